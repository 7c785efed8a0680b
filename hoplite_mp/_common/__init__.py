"""What several packages need: ids, object states, dtypes, reductions, clocks, locks, limits."""
