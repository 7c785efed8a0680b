"""Actors of this host, calls to actors of other hosts, and actors that move after a host's loss."""
