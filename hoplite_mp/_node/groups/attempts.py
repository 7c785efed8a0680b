"""Numbers of attempts at a call of a Group: what stands in them.

Why it exists: cells of two attempts must never meet, so each attempt has a number of its own, which
several rooms make or read. It is the members' version, then one bit that says whether a plan is
repeated, then in the bits below it the distance from the call that the plan was made for; else a
counter from 1 on.
It must never know: plans, members, who moves what.
"""

from __future__ import annotations

__all__ = ["ATTEMPT_BITS", "MADE_ATTEMPTS", "REPEATED", "is_repeated"]

ATTEMPT_BITS = 8
REPEATED = 1 << (ATTEMPT_BITS - 1)
MADE_ATTEMPTS = REPEATED - 1  # attempts of one call for which the leading node makes plans


def is_repeated(attempt: int) -> bool:
    """Did nodes begin this attempt by themselves?"""
    return bool(attempt & REPEATED)
