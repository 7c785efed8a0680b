"""The store of one host: its memory budget, spilling, pages and growing blocks."""
