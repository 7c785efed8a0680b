"""`hoplite-mp demo`: asynchronous training on one host with real data.

Needs the extra `demo` (scikit-learn, rich, matplotlib).
"""
