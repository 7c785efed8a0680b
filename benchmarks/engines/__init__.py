"""Collectives inside Ray and Dask, beside what these engines do themselves, over emulated hosts."""
