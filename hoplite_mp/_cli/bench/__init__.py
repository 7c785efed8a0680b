"""`hoplite-mp bench`: how fast the library is on this host, or in a running cluster."""
