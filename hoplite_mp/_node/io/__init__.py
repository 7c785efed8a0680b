"""The implementations of the node's ports, which alone access the operating system."""
