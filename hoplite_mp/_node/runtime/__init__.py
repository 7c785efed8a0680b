"""The node's process, the construction of its rooms, and its connection to the manager."""
