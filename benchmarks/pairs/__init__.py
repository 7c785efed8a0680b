"""Two builds, call by call in turn: what a change costs or saves where speed varies."""
