"""Two builds whose calls alternate: the effect of a change on a machine whose speed varies."""
