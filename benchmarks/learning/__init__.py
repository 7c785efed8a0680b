"""Experiments of hoplite_mp.ml on emulated hosts: `python -m benchmarks.learning NAME`."""
