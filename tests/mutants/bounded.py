"""Mistakes in bounded allreduces."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        "bounded-late-ranks-count",
        "hoplite_mp/_group/bounded_calls.py",
        "    members = tuple(rank for rank in view if rank not in out)\n    need = min(request.num",
        "    members = tuple(view)\n    need = min(request.num",
        (
            "A rank that is late is left out at the deadline; here its values are in the plan, and "
            "all others wait for it."
        ),
    ),
    Mutant(
        "bounded-results-of-late-ranks-are-dropped",
        "hoplite_mp/_group/bounded_calls.py",
        "    first = min(count for _, count in state.taken)\n    return replace(state, ended",
        "    first = max(count for _, count in state.taken)\n    return replace(state, ended",
        (
            "A late rank gets the result of each call that it was late for; here calls are "
            "forgotten when the first rank has their results, and the late rank waits for ever."
        ),
    ),
)
