"""Whole applications on emulated hosts: this library alone, inside Ray, and Ray or Dask alone."""
