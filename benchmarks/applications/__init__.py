"""Whole applications on emulated hosts: ours alone, inside Ray, and Ray or Dask alone."""
