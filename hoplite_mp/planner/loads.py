"""Which links a plan fills, if all are alike.

Why it exists: a rate that was reached says what a link can do only where the link was what the
bytes waited for. By the bounds of a star (planner/cost.py) that is so for who
sends or receives as many bytes as the busiest of all directions.

This module must never know how fast anything was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import Distribute

if TYPE_CHECKING:
    from hoplite_mp.protocol.messages import ExecuteReduce

__all__ = ["filled_links"]


def filled_links(plan: Distribute | ExecuteReduce, node: int) -> tuple[bool, bool]:
    """Does `node` (send, receive) as much as the busiest direction of all?"""
    if isinstance(plan, Distribute):
        return node in plan.sources, node in plan.receivers
    at_end = node in plan.destinations
    gives = node in plan.holders
    if plan.kind == "gather":
        return False, at_end
    if plan.kind == "reduce":
        return gives and not at_end, at_end
    return gives, at_end
