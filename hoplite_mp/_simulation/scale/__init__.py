"""One operation on very many simulated nodes: the real planner, and imitations of the rest."""
