"""The store of one host: its budget of memory, leases of blocks and spans, spilling, pages."""
