"""The node's only way to the operating system: what implements its ports."""
