"""Data connections of a node: what is asked for while one ends."""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _engine
from hoplite_mp._node.peers.links import UNREACHABLE
from hoplite_mp._node.store.growing_block import EngineBuffer
from hoplite_mp._transport.stream import TcpStream
from hoplite_mp.errors import NodeLostError
from tests.support.node_harness import member
from tests.support.transport import tcp_pair
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.peers.links import Links
    from tests.support.node_harness import NodeHarness

OTHER = member(7)
NBYTES = 100_000


class Late:
    """An engine whose events are taken when the loss of a link is among them."""

    waits = False

    def __init__(self, engine: _engine.Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def events(self) -> list[Any]:
        found: list[Any] = []
        while self.waits and not any(event[0] == _engine.LINK_LOST for event in found):
            select.select([self.engine], [], [])
            found += self.engine.events()
        return found


class PlanState:
    """Asks for the second cell as soon as the first one is there, as a gather of many does."""

    def __init__(self, links: Links, cells: list[int]) -> None:
        self.links, self.cells = links, cells
        self.heard: list[Any] = []

    def filled(self, cell: int) -> None:
        self.heard.append(("filled", cell))
        if cell == self.cells[0]:
            self.links.pull(self.cells[1], 7, (1, 1, 1, 0), self)

    def failed(self, cell: int, reason: str) -> None:
        self.heard.append(("failed", cell, reason))

    def describe(self, cell: int) -> dict[str, Any]:
        return {}


def test_next_cell_is_requested_when_its_link_is_lost(
    make_node: Callable[..., NodeHarness],
) -> None:
    """Both words come together: the node's loop was busy for a moment. The next cell then waits
    for another connection."""
    ours, theirs = tcp_pair()
    other = _engine.Engine(2, 256 << 10)
    with theirs:
        theirs.setblocking(False)
        other.connect(theirs.fileno(), 1)
    for index in range(2):
        other.cell((1, 1, index, 0), bytearray(b"x" * NBYTES), 0, NBYTES, True)
    engine = Late(_engine.Engine(1))
    node = make_node([OTHER], engine=engine)
    links = node.cluster.links
    node.connections.accept(OTHER.host_id, ours)
    memory = bytearray(2 * NBYTES)
    cells = [engine.cell(None, memory, at * NBYTES, NBYTES) for at in range(2)]
    part = PlanState(links, cells)
    links.pull(cells[0], 7, (1, 1, 0, 0), part)
    eventually(lambda: engine.watermark(cells[0]) == NBYTES)
    other.stop()
    engine.waits = True
    node.loop.watched[engine.fileno()]()
    assert part.heard == [("filled", cells[0])]
    (call,) = node.connections.data_calls
    call.end(NodeLostError("nobody answers"))
    links.pull(cells[1], 9, (1, 1, 1, 0), part)  # there is no such node
    assert part.heard[1:] == [
        ("failed", cells[1], UNREACHABLE),
        ("failed", cells[1], "the node is gone"),
    ]
    links.stop()


@pytest.mark.parametrize("found", ["our connection is made", "nobody answers"])
def test_later_pull_replaces_one_that_waits_for_a_connection(
    make_node: Callable[..., NodeHarness], found: str
) -> None:
    """A plan asks for a cell from a node to which a connection is only being made. Meanwhile that
    node makes one, and the next plan, which goes on with the same cell, pulls over that by its own
    key: the older key must not be asked for after it, because nobody serves that any more."""
    node = make_node([OTHER])
    links = node.cluster.links
    part = PlanState(links, [3, 4, 5])
    old, new = (1, 1, 0, 0), (1, 2, 0, 0)
    for cell in (3, 4, 5):
        links.pull(cell, 7, old, part)
    (call,) = node.connections.data_calls  # one connection serves all that wait for it
    links.close(5, EngineBuffer())
    ours, theirs = tcp_pair()
    node.connections.accept(OTHER.host_id, theirs)
    links.pull(3, 7, new, part)
    with ours:
        if found == "our connection is made":
            call.end(node.connections.admission(OTHER.host_id, TcpStream(ours)))
        else:
            call.end(NodeLostError("nobody answers"))
    pulls = [(about[1], about[3]) for about in node.engine.calls if about[0] == "pull"]
    if found == "our connection is made":
        assert pulls == [(3, new), (4, old)]
    else:
        assert pulls == [(3, new)]
        assert part.heard == [("failed", 4, UNREACHABLE)]
