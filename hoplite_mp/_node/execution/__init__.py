"""The execution of plans on one node: pulls, folds and serves, as cells of the engine."""
