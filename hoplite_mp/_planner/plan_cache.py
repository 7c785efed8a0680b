"""Caches stripe plans and packed trees for repeated operations.

Programs repeat the same collectives, and computing a stripe plan over a thousand nodes takes
milliseconds. Equal nodes, bytes and links give equal stripe plans.
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
FORESTS_MAX = 16


class PlanCache:
    """Stripe plans by the arguments that determine them, the most recent last."""

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
            if len(self._known) >= FORESTS_MAX:
                del self._known[next(iter(self._known))]
        self._known[versioned] = found
        return found


# Packed trees for LANs that are not a star: requested once, used as soon as they are packed.
#
# Packing takes seconds, and plans do not wait for packed trees. The first spread between certain
# nodes uses stripes and requests trees; later spreads use the trees. When a rate has changed, new
# trees are requested. Until these are packed, the previous trees are used if they are still faster
# than stripes. Stripes are used if narrow paths do not slow them down: with many receivers, each of
# these paths carries few bytes.


# Maximum number of nodes in a spread with packed trees. Packing 16 nodes takes 1.4 s in a thread
# that shares the interpreter with the manager's loop; 32 nodes would take about 20 s.
PACKED_NODES_MAX = 16
# Trees are packed if narrow paths slow stripes down by this factor. Lower: more packing, even for
# differences that are only measurement errors.
WORTH = 1.2
# Maximum number of cached packings, of a few kilobytes each.
PACKINGS_MAX = 64


# Maximum number of narrow paths that are named to users.
PATHS_NAMED_MAX = 4


class NarrowPaths(NamedTuple):
    """The rates of narrow paths in bytes a second, and the seconds that stripes take over them."""

    rates: Mapping[tuple[int, int], float]
    stripes_s: float

    @property
    def words(self) -> str:
        """The narrowest paths, for users."""
        paths = sorted(self.rates.items(), key=lambda item: (item[1], item[0]))
        named = [
            f"h{one} to h{other} {rate / 1e6:.3g} MB/s"
            for (one, other), rate in paths[:PATHS_NAMED_MAX]
        ]
        more = len(paths) - len(named)
        return f"narrow paths: {', '.join(named)}{f', and {more} more' if more else ''}"


class TreeCache:
    """The packed trees, and the requests for more."""

    def __init__(self, speeds: LinkSpeeds) -> None:
        self._speeds = speeds
        self._packed: dict[PackingWanted, TreesPacked | None] = {}  # None: requested
        self._latest: dict[tuple[int, ...], TreesPacked] = {}  # by nodes, regardless of the links
        self.wanted: list[PackingWanted] = []  # taken by the planner

    def take(self, trees: TreesPacked) -> None:
        """Records the answer to a PackingWanted. The next spread between these nodes uses it."""
        while len(self._packed) >= PACKINGS_MAX:
            del self._packed[next(iter(self._packed))]
        while len(self._latest) >= PACKINGS_MAX:
            del self._latest[next(iter(self._latest))]
        self._packed[trees.wanted] = self._latest[trees.wanted.nodes] = trees

    def used_by(
        self, plan: Distribute, seconds: float, now: float, notes: list[str]
    ) -> tuple[Distribute, float, NarrowPaths | None]:
        """Returns the faster plan, along packed trees (if there are any) or `plan`, its duration in
        seconds, and the narrow paths if they were considered. Requests trees that are worth
        packing. `seconds`: the duration with stripes if the LAN were a star."""
        nodes = (plan.sources[0], *plan.receivers)
        if len(nodes) > PACKED_NODES_MAX or self._speeds.is_star(nodes, now):
            return plan, seconds, None
        rates = self._speeds.pair_rates(nodes, now)
        held_up_s = cost.narrow_s(plan, rates)
        narrow = NarrowPaths(rates, held_up_s)
        if held_up_s <= WORTH * seconds:
            return plan, max(seconds, held_up_s), narrow
        wanted = PackingWanted.between(nodes, self._speeds, now)
        packed = self._packed.get(wanted)
        if wanted not in self._packed:
            self._packed[wanted] = None  # so that it is requested once
            self.wanted.append(wanted)
        if packed is None:
            packed = self._latest.get(wanted.nodes)
        if packed is None:
            return plan, held_up_s, narrow
        rate = packed.rate if packed.wanted == wanted else packed.rate_over(wanted)
        if plan.nbytes / rate >= held_up_s:
            return plan, held_up_s, narrow
        streams = packed.streams()
        stripes = tree_shapes.cut([(plan.sources[0], weight) for weight, _ in streams])
        rows = tuple(parents for _, parents in streams)[: len(stripes)]
        along = Distribute(
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
        notes.append(f"the LAN is no star: {len(set(rows))} packed trees, {rate:.3g} B/s")
        return along, plan.nbytes / rate, narrow
