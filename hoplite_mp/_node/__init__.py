"""The node: the process of each host that owns the store and cleans up after dead processes."""
