"""Helpers that several test modules share, by subject. No test module imports another one."""
