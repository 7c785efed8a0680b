"""Two nodes under TLS, each of which makes the connection over which it sends.

Links begin and end at any moment on both sides, and connections arrive late and in any order. Once
nothing fails any more, both nodes come to rest, with the two halves of one link or with none.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._node.peers import links as links_room
from hoplite_mp._node.peers.links import Links
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._transport.conversation import Admission
from tests.support.node_harness import NodeHarness, RecordedEngine, member

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEDS = 400
REST_MAX = 200  # events after the last fault


class End:
    """One end of a connection."""

    def __init__(self) -> None:
        self.other: End
        self.link: Pairing | None = None
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Pairing:
    """Stands for a TlsLink: which connections it has, without bytes."""

    world: World

    def __init__(self, engine: Any, number: int, answers: int = 0) -> None:
        self.side = engine.side
        self.answers = answers
        self.link = next(self.world.numbers)
        self.receiving = False
        self.open = True
        self.sends: End | None = None
        self.receives: End | None = None

    def send_over(self, end: End) -> None:
        if not self.open:
            end.close()
            self.world.ends(end)
            return
        self.sends = end
        self.began(end)

    def receive_over(self, end: End) -> None:
        assert not self.receiving
        self.receiving = True
        self.receives = end
        self.began(end)

    def began(self, end: End) -> None:
        end.link = self
        if end.other.closed:
            self.world.later(self.lost)

    def close(self) -> None:
        self.open = False
        for end in (self.sends, self.receives):
            if end is not None and not end.closed:
                end.close()
                self.world.ends(end)

    def lost(self) -> None:
        """The engine's event."""
        self.close()
        self.side.links._lost(self.link, 1 - self.side.number, "its end")


class PairEngine(RecordedEngine):
    """Knows the side to which it belongs."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side


class Side:
    def __init__(self, world: World, node: NodeHarness, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.world = node.number, world
        peers = node.cluster.peers
        monkeypatch.setattr(peers, "call", self.call)
        self.peer = peers.by_number[1 - self.number]
        self.links = Links(node.parts.host, peers, PairEngine(self))  # type: ignore[arg-type]

    @property
    def pairing(self) -> Any:
        return self.links.driven.get(1 - self.number)

    def call(self, member: Any, role: str, done: Any, link: tuple[int, int] = (0, 0)) -> None:
        """The other side hears of the connection, and this one of its answer, each at some time."""
        mine, theirs = End(), End()
        mine.other, theirs.other = theirs, mine
        other = self.world.sides[1 - self.number]
        self.world.later(lambda: done(self.admission(mine, link)))
        self.world.later(lambda: other.links.admitted(other.peer, self.admission(theirs, link)))

    def admission(self, end: End, link: tuple[int, int]) -> Admission:
        stream: Any = EndStream(self.world, end)
        peer = Introduction(1000 + self.number, {}, link=link[0], answers=link[1])
        return Admission(stream, "data", b"", peer, "10.0.0.9")

    def need(self) -> None:
        self.links._driven(self.peer.member)


class EndStream:
    """See `ByteStream`."""

    def __init__(self, world: World, end: End) -> None:
        self.world, self.end = world, end

    def detach(self) -> End:
        return self.end

    def close(self) -> None:
        self.world.shut(self.end)


class World:
    def __init__(self, seed: int, nodes: list[NodeHarness], patch: pytest.MonkeyPatch) -> None:
        self.dice = random.Random(seed)
        self.numbers = itertools.count(1)
        self.waiting: list[Any] = []
        Pairing.world = self
        self.sides = [Side(self, node, patch) for node in nodes]

    def later(self, event: Any) -> None:
        self.waiting.append(event)

    def shut(self, end: End) -> None:
        end.close()
        self.ends(end)

    def ends(self, end: End) -> None:
        """The other end sees that, unless it belongs to no link yet."""
        if end.other.link is not None:
            self.later(end.other.link.lost)

    def step(self) -> None:
        self.waiting.pop(self.dice.randrange(len(self.waiting)))()

    def play(self) -> None:
        for _ in range(30):
            side = self.dice.choice(self.sides)
            what = self.dice.random()
            if what < 0.2:
                side.need()
            elif what < 0.3 and side.pairing is not None:
                side.pairing.lost()
            elif self.waiting:
                self.step()
        for _ in range(REST_MAX):
            if not self.waiting:
                break
            self.step()
        assert not self.waiting, "links replace each other without end"
        self.check()

    def check(self) -> None:
        ours, theirs = (side.pairing for side in self.sides)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            for one, other in ((ours, theirs), (theirs, ours)):
                assert one.sends is not None
                assert one.sends.other is other.receives


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[NodeHarness]]:
    """Both nodes; each seed makes their links anew."""
    made = [NodeHarness([member(1 - at)], number=at, host_id=1000 + at, tls=True) for at in (0, 1)]
    yield made
    for node in made:
        node.close()


@pytest.mark.parametrize("first", range(0, SEEDS, 100))
def test_tls_connections_in_both_directions_settle(
    first: int, nodes: list[NodeHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_room, "TlsLink", Pairing)
    for seed in range(first, first + 100):
        try:
            World(seed, nodes, monkeypatch).play()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
