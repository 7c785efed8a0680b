"""Remembers the stripe plans of the last operations, for operations that are the same.

A program makes the same collectives again and again, and computing a stripe plan over a thousand
nodes takes milliseconds. The same nodes, bytes and links give the same stripe plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._planner import stripe_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hoplite_mp._planner.stripe_plan import StripePlan
    from hoplite_mp._planner.topology import Topology

__all__ = ["PlanCache"]

# Stripe plans that are kept, of some hundred bytes for each of their nodes. Higher: also programs
# that alternate between more kinds of operations are planned quickly.
FORESTS_MAX = 16


class PlanCache:
    """Stripe plans by the arguments that determine them, the latest last."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._known: dict[tuple[object, ...], StripePlan] = {}

    def spread(
        self, nbytes: int, source: int, receivers: Sequence[int], leaving: Collection[int]
    ) -> StripePlan:
        """As `stripe_plan.spread`."""
        key = nbytes, source, tuple(receivers), frozenset(leaving)
        return self._remembered(
            key, lambda: stripe_plan.spread(nbytes, source, receivers, self._topology, leaving)
        )

    def reduction(
        self,
        kind: str,
        nbytes: int,
        sent: Mapping[int, int],
        destinations: Sequence[int],
        *,
        ordered: bool,
        leaving: Collection[int],
    ) -> StripePlan:
        """As `stripe_plan.reduction`."""
        about = kind, nbytes, tuple(sent), tuple(sent.values()), tuple(destinations), ordered
        return self._remembered(
            (*about, frozenset(leaving)),
            lambda: stripe_plan.reduction(
                kind,
                nbytes,
                sent,
                destinations,
                self._topology,
                ordered=ordered,
                leaving=leaving,
            ),
        )

    def _remembered(self, about: tuple[object, ...], make: Callable[[], StripePlan]) -> StripePlan:
        key = self._topology.changes, *about
        found = self._known.pop(key, None)
        if found is None:
            found = make()
            if len(self._known) >= FORESTS_MAX:
                del self._known[next(iter(self._known))]
        self._known[key] = found
        return found
