"""Collectives inside Ray and Dask, compared with those of Ray and Dask, on emulated hosts."""
