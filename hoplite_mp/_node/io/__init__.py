"""The node's only access to the operating system: the implementations of its ports."""
