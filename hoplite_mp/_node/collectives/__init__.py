"""Collectives on refs: operations, reductions in chunks, and their ends."""
