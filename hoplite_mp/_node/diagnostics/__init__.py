"""Diagnostics: traces, dumps, counters."""
