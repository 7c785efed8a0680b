"""What must hold in a run: the invariants of all data that its processes read, and of its end."""
