"""Collectives on objects, and the execution of plans over several hosts."""
