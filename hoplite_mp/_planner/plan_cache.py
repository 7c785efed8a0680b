"""Caches stripe plans and packed trees for repeated operations.

Programs repeat the same collectives, and computing a stripe plan for a thousand nodes takes
milliseconds. For equal nodes, bytes and links the stripe plans are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._planner import cost, tree_shapes
from hoplite_mp._planner.packing import PackingWanted
from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from hoplite_mp._planner.link_speeds import LinkSpeeds
    from hoplite_mp._planner.packing import TreesPacked
    from hoplite_mp._planner.tree_shapes import StripePlan

__all__ = ["NarrowPaths", "PlanCache", "TreeCache"]


# Maximum number of cached stripe plans, of a few hundred bytes per node. Higher: programs that
# alternate between more kinds of operations are also planned quickly.
STRIPE_PLANS_MAX = 16


class PlanCache:
    """A cache of stripe plans, by the arguments that determine them. The most recent is last."""

    def __init__(self, speeds: LinkSpeeds) -> None:
        self._speeds = speeds
        self._known: dict[tuple[object, ...], StripePlan] = {}

    def spread(
        self, nbytes: int, source: int, receivers: Sequence[int], leaving: Collection[int]
    ) -> StripePlan:
        """Like `tree_shapes.spread`, but cached."""
        key = nbytes, source, tuple(receivers), frozenset(leaving)
        return self._remembered(
            key, lambda: tree_shapes.spread(nbytes, source, receivers, self._speeds, leaving)
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
        """Like `tree_shapes.reduction`, but cached."""
        key = (
            kind,
            nbytes,
            tuple(sent),
            tuple(sent.values()),
            tuple(destinations),
            ordered,
            frozenset(leaving),
        )
        return self._remembered(
            key,
            lambda: tree_shapes.reduction(
                kind,
                nbytes,
                sent,
                destinations,
                self._speeds,
                ordered=ordered,
                leaving=leaving,
            ),
        )

    def _remembered(self, key: tuple[object, ...], make: Callable[[], StripePlan]) -> StripePlan:
        versioned = self._speeds.changes, key
        found = self._known.pop(versioned, None)
        if found is None:
            found = make()
            if len(self._known) >= STRIPE_PLANS_MAX:
                del self._known[next(iter(self._known))]
        self._known[versioned] = found
        return found


# Packed trees for LANs that are not a star.
#
# Packing takes seconds, and plans do not wait for packed trees. The first broadcast between certain
# nodes uses stripes and requests trees; later broadcasts use the trees. When a rate has changed,
# new trees are requested. Until these are packed, the previous trees are used if they are still
# faster than stripes. Stripes are used if narrow paths do not slow them down, for example because
# each path carries few bytes in a large broadcast.


# Maximum number of nodes in a broadcast with packed trees. Packing trees for 16 nodes takes 1.4 s,
# in a thread that shares the interpreter with the manager's loop. For 32 nodes it would take about
# 20 s.
PACKED_NODES_MAX = 16
# Trees are packed if narrow paths slow down stripes by more than this factor. Lower: trees are
# packed more often, even if the difference is only a measurement error.
WORTH = 1.2
# Maximum number of cached packings, of a few kilobytes each.
PACKINGS_MAX = 64


# Maximum number of narrow paths that are named to users.
PATHS_NAMED_MAX = 4


class NarrowPaths(NamedTuple):
    """The narrow paths of a plan. A narrow path is slower than the links of both its hosts."""

    rates: Mapping[tuple[int, int], float]  # (sender, receiver) -> bytes per second
    stripes_s: float  # the duration with stripes, in seconds

    @property
    def words(self) -> str:
        """Text for users that names the narrowest paths."""
        paths = sorted(self.rates.items(), key=lambda item: (item[1], item[0]))
        named = [
            f"h{one} to h{other} {rate / 1e6:.3g} MB/s"
            for (one, other), rate in paths[:PATHS_NAMED_MAX]
        ]
        more = len(paths) - len(named)
        return f"narrow paths: {', '.join(named)}{f', and {more} more' if more else ''}"


class TreeCache:
    """A cache of packed trees, with the requests for more."""

    def __init__(self, speeds: LinkSpeeds) -> None:
        self._speeds = speeds
        self._packed: dict[PackingWanted, TreesPacked | None] = {}  # None: not packed yet
        self._latest: dict[tuple[int, ...], TreesPacked] = {}  # by nodes, for any rates
        self.wanted: list[PackingWanted] = []  # new requests; the planner removes them

    def take(self, trees: TreesPacked) -> None:
        """Records the answer to a request, for the next broadcasts between these nodes."""
        while len(self._packed) >= PACKINGS_MAX:
            del self._packed[next(iter(self._packed))]
        while len(self._latest) >= PACKINGS_MAX:
            del self._latest[next(iter(self._latest))]
        self._packed[trees.wanted] = self._latest[trees.wanted.nodes] = trees

    def used_by(
        self, plan: Distribute, seconds: float, now: float, notes: list[str]
    ) -> tuple[Distribute, float, NarrowPaths | None]:
        """Returns (the plan to use, its duration in seconds, the narrow paths if they were
        considered). The plan is `plan`, or a plan along packed trees if these are available and
        faster. Requests trees that are worth packing. `seconds`: the duration of `plan` if the LAN
        were a star."""
        nodes = (plan.sources[0], *plan.receivers)
        if len(nodes) > PACKED_NODES_MAX or self._speeds.is_star(nodes, now):
            return plan, seconds, None
        rates = self._speeds.pair_rates(nodes, now)
        stripes_s = cost.narrow_s(plan, rates)
        narrow = NarrowPaths(rates, stripes_s)
        if stripes_s <= WORTH * seconds:
            return plan, max(seconds, stripes_s), narrow
        wanted = PackingWanted.between(nodes, self._speeds, now)
        packed = self._packed.get(wanted)
        if wanted not in self._packed:
            self._packed[wanted] = None  # so that the trees are requested only once
            self.wanted.append(wanted)
        if packed is None:
            packed = self._latest.get(wanted.nodes)
        if packed is None:
            return plan, stripes_s, narrow
        rate = packed.rate if packed.wanted == wanted else packed.rate_over(wanted)
        if plan.nbytes / rate >= stripes_s:
            return plan, stripes_s, narrow
        streams = packed.streams()
        stripes = tree_shapes.cut([(plan.sources[0], weight) for weight, _ in streams])
        rows = tuple(parents for _, parents in streams)[: len(stripes)]
        along_trees = Distribute(
            plan.operation,
            plan.object,
            plan.epoch,
            plan.nbytes,
            plan.sources[:1],
            plan.receivers,
            stripes,
            "parents",
            rows,
        )
        notes.append(f"the LAN is not a star: {len(set(rows))} packed trees, {rate:.3g} B/s")
        return along_trees, plan.nbytes / rate, narrow
