"""The node: the process on each host that owns the store and cleans up after dead processes."""
