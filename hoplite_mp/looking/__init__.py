"""Commands for a running cluster: its state, once or live; what hangs; and a standby to promote."""
