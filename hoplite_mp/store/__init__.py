"""The store's decisions: where a block goes, what is evicted, what the host can spare. Pure but for
the reading of limits; the words themselves are changed by the node."""
