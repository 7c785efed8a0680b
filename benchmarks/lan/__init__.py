"""Benchmarks on several emulated hosts: `make bench-lan`."""
