"""The shared-memory protocols as a model in pure Python, explored completely.

docs/architecture.md states what may happen; this package shows that nothing else does. See
`memory.py` for the explorer, `header.py` for the tables, `reference.py` for the sequential object
beside which the compiled code runs.
"""
