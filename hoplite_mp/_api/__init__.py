"""The public classes and functions, which `hoplite_mp` re-exports: clusters, executors, refs."""
