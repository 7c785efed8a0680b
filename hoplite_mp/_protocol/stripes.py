"""A stripe: a range of an object with the node at the root of its tree.

Copies, collectives and groups all cut objects in the same way, so they import this file. Ranges are
in shares of SHARES, because the planner does not know what an object is made of. Nodes turn shares
into elements (reductions: `items * share >> 20`) or bytes (copies: rounded down to 64).

This module must never know what moves along the tree.
"""

from __future__ import annotations

from operator import lt
from typing import Any

import msgspec

from hoplite_mp._protocol.fields import SHARES, numbers

COPY_ALIGN = 64


class Stripe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shares [begin_share, end_share) of SHARES of an object, whose tree begins at `owner`. A
    message may carry one for each node, so it checks all of them together, which is faster."""

    owner: int
    begin_share: int
    end_share: int


def whole_object(name: str, stripes: Any) -> None:
    """A tuple of stripes that follow one another and cover all shares; none is empty."""
    if not isinstance(stripes, tuple):
        raise ValueError(f"{name} must be a tuple, not {stripes!r}")
    owners = [stripe.owner for stripe in stripes]
    begins = [stripe.begin_share for stripe in stripes]
    ends = [stripe.end_share for stripe in stripes]
    numbers(f"owners of {name}", tuple(owners))
    numbers(f"ends of {name}", tuple(ends), SHARES)
    if not all(map(lt, begins, ends)):
        raise ValueError(f"each of {name} must end after its beginning: {stripes!r}")
    if begins != [0, *ends[:-1]] or not ends:
        raise ValueError(f"{name} must follow each other: {stripes!r}")
    if ends[-1] != SHARES:
        raise ValueError(f"{name} must cover all {SHARES} shares: {stripes!r}")


def copy_offset(nbytes: int, share: int) -> int:
    """Where a share of a copied object begins, in bytes."""
    return nbytes if share == SHARES else (nbytes * share >> 20) // COPY_ALIGN * COPY_ALIGN
