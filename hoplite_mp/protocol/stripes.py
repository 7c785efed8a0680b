"""A stripe: a range of an object with the node at the root of its tree.

Copies, collectives and groups all cut objects in the same way, so this stands below them. Ranges
are in shares of SHARES, because the planner does not know what an object is made of: nodes turn
shares into elements (reductions: `items * share >> 20`) or bytes (copies: rounded down to 64).

This module must never know what moves along the tree.
"""

from __future__ import annotations

from typing import Any

import msgspec

from hoplite_mp.protocol.fields import SHARES, U64_MAX, between, counts

COPY_ALIGN = 64


class Stripe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Shares [begin_share, end_share) of SHARES of an object, whose tree begins at `owner`."""

    owner: int
    begin_share: int
    end_share: int

    def __post_init__(self) -> None:
        owner, begin, end = self.owner, self.begin_share, self.end_share
        # There may be one a node: what is right is seen at once, what is wrong is named below.
        integers = type(owner) is type(begin) is type(end) is int
        if integers and 0 <= begin < end <= SHARES and 0 <= owner <= U64_MAX:
            return
        counts(owner=self.owner)
        between("begin_share", self.begin_share, 0, SHARES - 1)
        between("end_share", self.end_share, self.begin_share + 1, SHARES)


def whole_object(name: str, stripes: Any) -> None:
    """A tuple of stripes that follow each other and cover all shares."""
    if not isinstance(stripes, tuple):
        raise ValueError(f"{name} must be a tuple, not {stripes!r}")
    end = 0
    for stripe in stripes:
        if stripe.begin_share != end:
            raise ValueError(f"{name} must follow each other: {stripes!r}")
        end = stripe.end_share
    if end != SHARES:
        raise ValueError(f"{name} must cover all {SHARES} shares: {stripes!r}")


def copy_offset(nbytes: int, share: int) -> int:
    """Where a share of a copied object begins, in bytes."""
    return nbytes if share == SHARES else (nbytes * share >> 20) // COPY_ALIGN * COPY_ALIGN
