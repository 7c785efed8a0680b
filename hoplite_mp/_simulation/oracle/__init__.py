"""The invariants of a run: of all data that its processes read, and of its end."""
