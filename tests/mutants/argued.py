"""Mistakes of the list that no program on a cluster can notice, and why.

Why it exists: a mutant that nobody sees is either a promise that nothing checks, or no promise. For
each of these somebody has followed what the changed line leads to, and says what keeps it harmless.
It must never know: which seeds were played.
"""

from __future__ import annotations

__all__ = ["ARGUED"]

# Name of the mutant -> why nothing that is promised depends on that line.
ARGUED: dict[str, str] = {
    "group-calls-frees-parts-of-the-dead": (
        "An attempt pins what members of its node give (PlanExecutor._pin) until after the commit, "
        "when the results have been made of it. A node commits an attempt only if it has begun it, "
        "or has no member whose part the result needs. A decision without a plan is that of one "
        "node, which leads, and decides again without a member that has died."
    ),
}
