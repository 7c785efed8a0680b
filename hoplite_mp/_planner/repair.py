"""What a plan keeps when a node is lost: the stripes of the other owners stay where they are.

Owners hold every contribution in its own slot until the commit. So after a death the survivors
fold again what they have, without the dead node's slots, and none of these bytes is sent again.
Only the dead node's own stripes are, which are cut among the other owners. Under the new epoch a
stripe with the same owner and the same bounds is the same stripe as before, and a slot of it may be
kept if its contributor gives the same members as before. With n owners, a death half way costs
about 1/n of the operation. The stripes of a node whose link has become slow are cut in the same
way (`slow_owners`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import Stripe

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


# A repaired stripe plan is used unless its busiest owner has more than this many times as much as
# in the best new one, because then sending everything again is faster.
KEPT_WIDTH_MAX = 2


def kept_cut(
    before: Sequence[Stripe], able: Collection[int], fresh: Sequence[Stripe]
) -> tuple[Stripe, ...] | None:
    """The previous plan's stripes, repaired; None unless nearly as good as the `fresh` ones."""
    kept = repaired(before, able)
    if kept is None or widest(kept) > KEPT_WIDTH_MAX * widest(fresh):
        return None
    return kept


def widest(stripes: Sequence[Stripe]) -> int:
    """The number of shares of the owner that has the most."""
    widths: dict[int, int] = {}
    for stripe in stripes:
        width = stripe.end_share - stripe.begin_share
        widths[stripe.owner] = widths.get(stripe.owner, 0) + width
    return max(widths.values())


def repaired(stripes: Sequence[Stripe], able: Collection[int]) -> tuple[Stripe, ...] | None:
    """The same stripes, except that those whose owner is not in `able` are cut among the other
    owners, in proportion to what these own already; None if no owner is left.
    """
    widths: dict[int, int] = {}
    for stripe in stripes:
        if stripe.owner in able:
            width = stripe.end_share - stripe.begin_share
            widths[stripe.owner] = widths.get(stripe.owner, 0) + width
    if not widths:
        return None
    total = sum(widths.values())
    result: list[Stripe] = []
    for stripe in stripes:
        if stripe.owner in able:
            result.append(stripe)
            continue
        begin, length = stripe.begin_share, stripe.end_share - stripe.begin_share
        reached = 0
        for owner, width in widths.items():
            reached += width
            end = stripe.begin_share + length * reached // total
            if end > begin:
                result.append(Stripe(owner, begin, end))
                begin = end
    return tuple(result)
