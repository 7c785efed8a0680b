"""Faults of a run: deaths, cuts and restarts at random times, and faults that messages trigger."""
