"""The store of one host: its budget of memory, spilling, pages, blocks that are still written."""
