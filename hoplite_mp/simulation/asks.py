"""What processes of one node ask for: gets and collectives, and what they hear of it.

Why it exists: it imitates who reports sources (node/collectives/operations.py), how a node learns
of objects of others (node/objects/imports.py, node/objects/exports.py), and what a commit leaves at
the node that asked.
It must never know: how bytes move, how plans look.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.protocol.messages import (
    Commit,
    OperationFailed,
    ReduceRequested,
    SourceFailed,
    SourceReady,
)
from hoplite_mp.simulation.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp.protocol.messages import NodeToManager
    from hoplite_mp.simulation.imitated import ImitatedNode
    from hoplite_mp.simulation.memory import Memory
    from hoplite_mp.simulation.waits import Wait

__all__ = ["OPERATION_BITS", "Ask", "Asks", "Wanted"]

# Below the number of the node that asks, in the number of an operation.
OPERATION_BITS = 40
INCARNATION_SHIFT = 24


@dataclass(frozen=True, slots=True)
class Wanted:
    """A collective as its caller writes it."""

    kind: str
    sources: tuple[bytes, ...]
    num: int
    to: tuple[int, ...] = ()
    results: tuple[bytes, ...] = ()
    deadline_s: float | None = None
    reproducible: bool = False


@dataclass(slots=True, eq=False)
class Ask:
    """One that is under way."""

    number: int
    wanted: Wanted
    wait: Wait
    pending: dict[bytes, list[int]] = field(default_factory=dict)  # not ready yet: its indices
    asked_at: float = 0.0


@dataclass(slots=True, eq=False)
class Import:
    """An object of another node: "asked", "pending", "ready" or why it is lost."""

    standing: str = "asked"
    nbytes: int = 0
    holders: tuple[int, ...] = ()
    waiting: list[Callable[[], None]] = field(default_factory=list)


class Asks:
    """All of one life of a node."""

    def __init__(self, node: ImitatedNode) -> None:
        self.node = node
        self.asks: dict[int, Ask] = {}
        self.imports: dict[bytes, Import] = {}
        self.importers: dict[bytes, dict[ImitatedNode, None]] = {}  # of objects here: who asked
        self.readers: dict[bytes, list[Wait]] = {}  # of what is not ready yet
        # What a former life of this home asked for may still be under way somewhere.
        self._next = node.incarnation << INCARNATION_SHIFT | 1

    @property
    def last(self) -> int:
        """The count of the latest collective."""
        return self._next - 1

    # ---- what is known of objects

    def acquire(self, objects: tuple[bytes, ...], done: Callable[[], None]) -> None:
        """Calls `done` as soon as it is known how all of them stand."""
        left = 0

        def one_less() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        for object_id in dict.fromkeys(objects):
            if self.node.places.is_own(object_id) or self.standing(object_id) == "here":
                continue
            known = self.imports.get(object_id)
            if known is None:
                known = self.imports[object_id] = Import()
                if not self.node.tell_home(object_id, "acquire"):
                    known.standing = "its host is not in this cluster"
            if known.standing == "asked":
                left += 1
                known.waiting.append(one_less)
        if not left:
            done()

    def standing(self, object_id: bytes) -> str:
        """ "here", "elsewhere", "pending", or why it is lost."""
        places = self.node.places
        if object_id in places.holds:
            return "here"
        if object_id in places.places:
            return "elsewhere"
        if places.is_own(object_id):
            return "pending" if self.node.world.truth.is_pending(object_id) else "it is gone"
        known = self.imports.get(object_id)
        if known is None:
            return "it is unknown"
        return "elsewhere" if known.standing == "ready" else known.standing

    def asked(self, node: ImitatedNode, object_id: bytes) -> None:
        """Another node wants to know how an object of this one stands."""
        self.importers.setdefault(object_id, {})[node] = None
        self._describe(node, object_id)

    def _describe(self, node: ImitatedNode, object_id: bytes) -> None:
        standing = self.standing(object_id)
        places = self.node.places
        holders = places.holders(object_id)
        if standing == "elsewhere":
            holders, standing = places.places[object_id].holders, "here"
        nbytes = self.node.world.truth.sizes.get(object_id, 0)
        self.node.tell(node, "described", object_id, standing, nbytes, holders)

    def described(self, object_id: bytes, standing: str, nbytes: int, holders: Any) -> None:
        """The home's answer: at once, and when what was pending is done."""
        known = self.imports.get(object_id)
        if known is None or known.standing not in ("asked", "pending"):
            return
        known.standing = "ready" if standing == "here" else standing
        known.nbytes, known.holders = nbytes, holders
        if known.standing == "ready":
            self.node.places.expect(object_id, nbytes, holders)
        self._settled(object_id, known)

    def _settled(self, object_id: bytes, known: Import) -> None:
        waiting, known.waiting = known.waiting, []
        for done in waiting:
            done()
        if known.standing != "pending":
            self.look(object_id)

    def sealed(self, object_id: bytes) -> None:
        """An object of this node is ready."""
        for node in self.importers.get(object_id, ()):
            self._describe(node, object_id)
        self.look(object_id)

    # ---- gets

    def get(self, object_id: bytes) -> Wait:
        """A process wants the value here."""
        wait: Wait = self.node.world.waits.begin(self.node, f"get of {object_id.hex()[:20]}")
        self.acquire((object_id,), lambda: self._get(object_id, wait))
        return wait

    def _get(self, object_id: bytes, wait: Wait) -> None:
        standing = self.standing(object_id)
        if standing == "here":
            wait.end("")
        elif standing == "elsewhere":
            self.node.places.want(self._place(object_id), wait.end)
        elif standing == "pending":
            self.readers.setdefault(object_id, []).append(wait)
        else:
            wait.end(standing)

    def _place(self, object_id: bytes) -> Place:
        place: Place | None = self.node.places.places.get(object_id)
        if place is None:
            known = self.imports[object_id]
            place = self.node.places.expect(object_id, known.nbytes, known.holders)
            assert place is not None
        return place

    # ---- collectives

    def begin(self, wanted: Wanted) -> Wait:
        """A process calls a collective."""
        number = self.node.number << OPERATION_BITS | self._next
        self._next += 1
        wait: Wait = self.node.world.waits.begin(self.node, f"{wanted.kind} {number}")
        self.acquire(wanted.sources, lambda: self._request(Ask(number, wanted, wait)))
        return wait

    def _request(self, ask: Ask) -> None:
        self.asks[ask.number] = ask
        ask.asked_at = self.node.now
        self.node.world.truth.remember(ask, self.node)
        for message in self.request(ask):
            self.node.send_manager(message)

    def request(self, ask: Ask) -> Iterator[NodeToManager]:
        """What the manager is told of it, as things stand now."""
        wanted, node = ask.wanted, self.node
        ask.pending = {}
        deadline_s = wanted.deadline_s
        if deadline_s is not None:
            deadline_s = max(0.0, deadline_s - (node.now - ask.asked_at))
        ready: list[int] = []
        failed: list[int] = []
        for index, object_id in enumerate(wanted.sources):
            standing = self.standing(object_id)
            if standing in ("here", "elsewhere"):
                ready.append(index)
            elif standing == "pending":
                ask.pending.setdefault(object_id, []).append(index)
            else:
                failed.append(index)
        told = [self._about(wanted.sources[index]) for index in ready]
        yield ReduceRequested(
            ask.number,
            node.number,
            1,
            wanted.sources,
            "sum",
            wanted.num,
            deadline_s,
            wanted.reproducible,
            wanted.results,
            wanted.kind,
            tuple(ready),
            wanted.to,
            tuple(nbytes for nbytes, _, _ in told),
            tuple(layout for _, layout, _ in told),
            tuple(holders for _, _, holders in told),
        )
        for index in failed:
            yield SourceFailed(ask.number, index, "it is lost")

    def _about(self, object_id: bytes) -> tuple[int, bytes, tuple[int, ...]]:
        places = self.node.places
        place = places.places.get(object_id)
        nbytes = self.node.world.truth.sizes[object_id]
        holders: tuple[int, ...] = (self.node.number,)
        if object_id not in places.holds and place is not None:
            holders = place.holders
        elif object_id not in places.holds:
            holders = self.imports[object_id].holders
        return nbytes, b"float32 %d" % nbytes, holders

    def look(self, object_id: bytes) -> None:
        """An object has become ready, or lost: is it a source of ours?"""
        standing = self.standing(object_id)
        if standing == "pending":
            return
        for wait in self.readers.pop(object_id, ()):
            self._get(object_id, wait)
        for ask in list(self.asks.values()):
            for index in ask.pending.pop(object_id, ()):
                if standing not in ("here", "elsewhere"):
                    self.node.send_manager(SourceFailed(ask.number, index, standing))
                    continue
                nbytes, layout, holders = self._about(object_id)
                if holders:
                    about = holders[0], nbytes, layout, holders[1:]
                    self.node.send_manager(SourceReady(ask.number, index, *about))

    # ---- ends

    def committed(self, message: Commit, blocks: dict[int, Memory]) -> None:
        """The end of one of ours: its results are here, or at other nodes."""
        ask = self.asks.pop(message.operation, None)
        if ask is None:
            return
        wanted, node = ask.wanted, self.node
        node.world.truth.check_commit(ask, message)
        if wanted.kind in FOLDING:
            self._place_results(wanted, message, blocks)
        else:
            self._tell_homes(wanted, message)
        ask.wait.end("")

    def _place_results(self, wanted: Wanted, message: Commit, blocks: dict[int, Memory]) -> None:
        places = self.node.places
        scattered = wanted.kind == "reduce_scatter"
        for index, object_id in enumerate(wanted.results):
            if index in blocks:
                places.put(object_id, blocks[index])
                if not scattered:
                    others = set(message.destinations) - {self.node.number}
                    places.kept_at.setdefault(object_id, set()).update(others)
            else:
                holders = (message.destinations[index],) if scattered else message.destinations
                nbytes = self.node.world.truth.sizes[object_id]
                places.places[object_id] = Place(object_id, nbytes, holders)
            self.sealed(object_id)

    def _tell_homes(self, wanted: Wanted, message: Commit) -> None:
        places = self.node.places
        others = [n for n in message.destinations if n in self.node.members]
        for index in message.contributors if others else ():
            at = others
            if wanted.kind == "alltoall":
                place = message.destinations[index % len(message.destinations)]
                at = [place] if place in others else []
            object_id = wanted.sources[index]
            if not at:
                continue
            if places.is_own(object_id):
                places.kept_at.setdefault(object_id, set()).update(at)
            else:
                self.node.tell_home(object_id, "kept", tuple(at))

    def failed(self, message: OperationFailed) -> None:
        """The end of one of ours that cannot come true."""
        ask = self.asks.pop(message.operation, None)
        if ask is not None:
            raise AssertionError(f"{message}, and nothing had happened")
