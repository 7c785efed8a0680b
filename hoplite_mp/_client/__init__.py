"""Each process's access to a cluster: the store, tasks, and its host's node."""
