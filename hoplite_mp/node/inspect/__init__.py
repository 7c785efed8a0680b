"""What people look at: traces, dumps, counters."""
