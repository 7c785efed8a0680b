"""The node's process, the construction of its components, and its connection to the manager."""
