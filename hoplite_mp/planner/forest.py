"""Who adds up which part of a result: one tree per stripe.

The vocabulary allows any number of stripes, each with an owner at the root of a tree of nodes.
When all sources are in one store every tree is a single vertex, so there is one stripe, and its
owner is the node that asked.

This module must never know why a source is a member, nor how bytes move.
"""

from __future__ import annotations

from hoplite_mp.protocol.fields import SHARES
from hoplite_mp.protocol.operations import Stripe


def single_vertex(node: int) -> tuple[Stripe, ...]:
    """The forest of one node: it owns the whole result."""
    return (Stripe(node, 0, SHARES),)


def owners(stripes: tuple[Stripe, ...]) -> set[int]:
    """Every node that must report its stripes complete before the result counts."""
    return {stripe.owner for stripe in stripes}
