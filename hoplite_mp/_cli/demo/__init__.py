"""The main job of the library on one host, on real data: `hoplite-mp demo`.

Needs the extra `demo` (scikit-learn, rich, matplotlib).
"""
