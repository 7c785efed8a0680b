"""Actors of this host and of others."""
