"""Collectives on refs: operations, and reductions in chunks."""
