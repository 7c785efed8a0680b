"""Objects of this host and of others: leases, results, imports, exports, replicas, new owners."""
