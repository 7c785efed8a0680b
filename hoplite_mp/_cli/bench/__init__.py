"""`hoplite-mp bench`: the speed of the library on this host, or in a running cluster."""
