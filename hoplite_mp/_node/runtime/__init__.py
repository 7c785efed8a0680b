"""The node's process, the construction of its components, and its tables of handlers."""
