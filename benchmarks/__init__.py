"""Benchmarks, one module per subject. `python -m benchmarks` runs them and prints one table."""
