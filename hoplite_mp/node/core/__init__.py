"""The node's process, the building of its rooms, its manager."""
