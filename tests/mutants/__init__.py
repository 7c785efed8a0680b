"""Mistakes in shipped lines, and whether the simulation sees them."""
