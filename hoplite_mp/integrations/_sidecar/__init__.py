"""A cluster beside another engine: one node on each host, shared by the engine's processes."""
