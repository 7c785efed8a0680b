"""The execution of plans on one node: the pulls, folds and serves that the engine performs."""
