"""Actors of this host and of others, and their failover after the loss of a host."""
