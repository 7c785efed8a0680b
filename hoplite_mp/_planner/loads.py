"""How much of a plan goes over which link, and which links it fills if all are alike.

Why it exists: a measured rate shows what a link can do only if the link was the bottleneck. By the
bounds of a star (_planner/cost.py) that is so for each node that sends or receives as many bytes as
the busiest direction of all.

This module must never know how fast anything was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["filled_links", "shares_sent"]


def filled_links(plan: Distribute | ExecuteReduce, node: int) -> tuple[bool, bool]:
    """Does `node` (send, receive) as much as the busiest direction of all?"""
    if isinstance(plan, Distribute):
        return node in plan.sources, node in plan.receivers
    if plan.is_early:  # links are idle until all have called
        return False, False
    at_end = node in plan.destinations
    gives = node in plan.holders
    if plan.kind == "gather":
        return False, at_end
    if plan.kind == "reduce":
        return gives and not at_end, at_end
    return gives, at_end


def shares_sent(plan: Distribute) -> dict[int, int]:
    """Shares that each node sends by a plan with rule "stripes", added up over its receivers."""
    shares: dict[int, int] = {}
    others, receiving = len(plan.receivers) - 1, set(plan.receivers)
    sources, count = plan.sources, len(plan.sources)
    for index, stripe in enumerate(plan.stripes):
        owner, width = stripe.owner, stripe.end_share - stripe.begin_share
        if owner not in receiving:
            shares[owner] = shares.get(owner, 0) + width * (others + 1)
            continue
        shares[owner] = shares.get(owner, 0) + width * others
        if count:
            source = sources[index % count]
            shares[source] = shares.get(source, 0) + width
    return shares
