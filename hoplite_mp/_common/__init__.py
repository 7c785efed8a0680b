"""Code that several packages share: ids, object states, reductions, clocks, locks, limits."""
