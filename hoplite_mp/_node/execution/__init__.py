"""The execution of one node's part in plans: pulls, folds and serves, as cells of the engine."""
