"""`hoplite-mp bench`: what this host, or a running cluster, does with the library."""
