"""`hoplite-mp doctor`: what is wrong with this host, and with the way to a cluster."""
