"""Objects of this host and other hosts: leases, results, imports, exports, replicas, ownership."""
