"""What every process of a cluster has: access to the store, to tasks, and to its host's node."""
