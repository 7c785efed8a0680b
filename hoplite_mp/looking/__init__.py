"""The commands that look at a running cluster: once, live, or at what hangs."""
