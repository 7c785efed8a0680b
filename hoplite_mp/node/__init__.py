"""The node: the store's owner on one host, and the one that cleans up after the dead."""
