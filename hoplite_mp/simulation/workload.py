"""What the processes of a simulated cluster do, drawn by chance: puts, collectives, gets.

Why it exists: a run needs work for faults to disturb. All kinds that the planner has come up, with
sources that become ready late, early or never alike, small and large, twice in one collective, and
with results that are read and reduced again.
It must never know: what goes wrong meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.simulation.asks import OPERATION_BITS, Wanted

if TYPE_CHECKING:
    from hoplite_mp.simulation.host import Node
    from hoplite_mp.simulation.waits import Wait
    from hoplite_mp.simulation.world import World

__all__ = ["Workload"]

KINDS = ("reduce", "reduce", "allreduce", "allreduce", "reduce_scatter", "broadcast", "gather",
         "allgather", "alltoall")  # fmt: skip
# Bytes that all collectives of a run together want to move, about: what a run may cost.
BYTES_MAX = 48 << 20
SIZES = (0, 4, 1 << 10, 64 << 10, 300_000, 1 << 20, 4 << 20, 16 << 20)


class Workload:
    """Of one run; it is over when everything that was begun has ended."""

    def __init__(self, world: World, span_s: float) -> None:
        """span_s: within which it begins everything."""
        self.world = world
        self.chance = world.timeline.chance
        self.gets: list[tuple[bytes, Wait]] = []
        self.span_s = span_s
        self.left = BYTES_MAX

    def begin(self) -> None:
        """Schedules it."""
        chance = self.chance
        for _ in range(chance.randint(1, 4)):
            self.world.timeline.after(chance.random() * self.span_s, self._collective)
        for _ in range(chance.randint(0, 3)):
            self.world.timeline.after(chance.random() * self.span_s, self._some_gets)

    # ---- who and what

    def _nodes(self) -> list[Node]:
        """Those that run, and that all others know: a ref does not travel faster than that word."""
        stopped = self.world.network.stopped
        living = [node for node in self.world.hosts if node.alive and not node.given_up]
        return [
            node
            for node in living
            if node.host not in stopped
            and all(other is node or node.number in other.members for other in living)
        ]

    def _size(self, copies: int) -> int:
        room = self.left // max(1, copies)
        nbytes = self.chance.choice([size for size in SIZES if size <= max(4, room)])
        self.left -= nbytes * copies
        return nbytes

    def _object(self, nodes: list[Node], nbytes: int) -> bytes:
        late = self.chance.choice([0.0, 0.0, 0.0, 0.001, 0.03, 0.2]) * self.chance.random()
        return self.world.put(self.chance.choice(nodes), nbytes, late)

    # ---- what they do

    def _some_gets(self) -> None:
        """One object, wanted in many places at nearly the same time."""
        nodes = self._nodes()
        if not nodes:
            return
        many = self.chance.randint(1, len(nodes))
        object_id = self._object(nodes, max(1, self._size(many)))
        for node in self.chance.sample(nodes, many):
            node.after(self.chance.random() * 0.05, self._get, node, object_id)

    def _get(self, node: Node, object_id: bytes) -> None:
        self.gets.append((object_id, node.asks.get(object_id)))

    def _collective(self) -> None:
        nodes = self._nodes()
        if not nodes:
            return
        chance = self.chance
        asker = chance.choice(nodes)
        kind = chance.choice(KINDS)
        count = 1 if kind == "broadcast" else chance.randint(1, min(2 * len(nodes), 70))
        copies = count
        if kind not in ("reduce", "gather", "alltoall"):
            copies = len(nodes) * (count if kind == "allgather" else 2)
        nbytes = self._size(copies)
        if kind not in FOLDING:
            nbytes = max(1, nbytes)
        sources = [self._object(nodes, nbytes) for _ in range(count)]
        if count > 1 and chance.random() < 0.15:
            sources[-1] = sources[0]  # twice
        to = self._to(kind, nodes)
        results: tuple[bytes, ...] = ()
        if kind in FOLDING:
            slices = 1 if kind != "reduce_scatter" else (len(to) or chance.randint(1, 5))
            results = tuple(self.world.result(asker, nbytes) for _ in range(slices))
            if kind == "reduce_scatter":
                self._slice_sizes(results, nbytes)
        wanted = Wanted(
            kind,
            tuple(sources),
            chance.choice([count, chance.randint(1, count)]),
            to,
            results,
            chance.choice([None, None, None, 0.0, 0.01, 0.3]),
            kind in FOLDING and chance.random() < 0.2,
        )
        wait = asker.asks.begin(wanted)
        self._afterwards(asker, wait, results)

    def _slice_sizes(self, results: tuple[bytes, ...], nbytes: int) -> None:
        size, longer = divmod(nbytes // 4, len(results))
        for index, one in enumerate(results):
            self.world.truth.sizes[one] = 4 * (size + (index < longer))

    def _to(self, kind: str, nodes: list[Node]) -> tuple[int, ...]:
        chance = self.chance
        some = [node.number for node in chance.sample(nodes, chance.randint(1, len(nodes)))]
        if kind in ("reduce", "gather"):
            return () if chance.random() < 0.5 else tuple(some[:1])
        if kind == "alltoall":
            return tuple(some[:6])
        if kind == "reduce_scatter":
            return () if chance.random() < 0.5 else tuple(some[:5])
        return () if chance.random() < 0.5 else tuple(some)

    def _afterwards(self, asker: Node, wait: Wait, results: tuple[bytes, ...]) -> None:
        chance = self.chance
        if chance.random() < 0.05:
            number = asker.number << OPERATION_BITS | asker.asks.last
            asker.after(chance.random() * self.span_s, asker.asks.drop, number)
        for one in results:
            if self.world.truth.sizes[one] and chance.random() < 0.5:
                reader = chance.choice(self._nodes() or [asker])
                reader.after(chance.random() * self.span_s, self._get, reader, one)
