"""What every process of a cluster has: the way to the store, to tasks, and to its node."""
