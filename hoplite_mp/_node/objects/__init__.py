"""Objects of this host and of others: memory, results, imports, exports, replicas."""
