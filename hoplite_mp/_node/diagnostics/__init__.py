"""Introspection: traces, dumps, counters."""
