"""`hoplite-mp doctor`: problems of this host, and of its connection to a cluster."""
