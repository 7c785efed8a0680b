"""Actors on this host and on other hosts, and their failover after the loss of a host."""
