"""Data connections of a node: what is asked for while one ends."""

from __future__ import annotations

import select
import time
from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp import _engine
from hoplite_mp._node.peers.links import UNREACHABLE, Links
from hoplite_mp._node.trace_events import TraceEvents
from tests.support.node_ports import ManualLoop, UnhandledEvents
from tests.support.transport import tcp_pair

NBYTES = 100_000


class Late:
    """An engine whose events are taken when the loss of a link is among them."""

    def __init__(self, engine: _engine.Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def events(self) -> list[Any]:
        found: list[Any] = []
        while not any(event[0] == _engine.LINK_LOST for event in found):
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


def _connect(links: Links, sock: Any) -> None:
    """A connection with node 7, as if that one had made it."""
    with sock:
        sock.setblocking(False)
        link = links.engine.connect(sock.fileno(), 7)
    links._count(link, 7)
    links.links[7] = link


def test_the_next_cell_is_asked_for_when_its_link_is_lost() -> None:
    """Both words come together: the node's loop was busy for a moment."""
    ours, theirs = tcp_pair()
    other = _engine.Engine(2, 256 << 10)
    with theirs:
        theirs.setblocking(False)
        other.connect(theirs.fileno(), 1)
    for index in range(2):
        other.cell((1, 1, index, 0), bytearray(b"x" * NBYTES), 0, NBYTES, True)
    node: Any = SimpleNamespace(
        client=SimpleNamespace(host_id=1),
        loop=ManualLoop(),
        trace_events=TraceEvents(ManualLoop(), UnhandledEvents()),
    )
    peers: Any = SimpleNamespace(
        start=SimpleNamespace(tls=False), is_near=lambda number: False, by_number={}
    )
    links = Links(node, peers, _engine.Engine(1))
    _connect(links, ours)
    memory = bytearray(2 * NBYTES)
    cells = [links.engine.cell(None, memory, at * NBYTES, NBYTES) for at in range(2)]
    part = PlanState(links, cells)
    links.pull(cells[0], 7, (1, 1, 0, 0), part)
    while links.engine.watermark(cells[0]) < NBYTES:
        time.sleep(0.001)
    other.stop()
    links.engine = Late(links.engine)  # type: ignore[assignment]
    links.on_ready()
    assert part.heard == [("filled", cells[0]), ("failed", cells[1], "the node is gone")]
    links.stop()


class Recorder:
    """An engine that only remembers what is pulled, and by which key."""

    def __init__(self) -> None:
        self.pulls: list[Any] = []

    def fileno(self) -> int:
        return 0

    def connect(self, fd: int, peer: int) -> int:
        return fd

    def pull(self, cell: int, link: int, key: Any) -> None:
        self.pulls.append((cell, key))

    def close(self, cell: int) -> None: ...


@pytest.mark.parametrize("found", ["our connection is made", "nobody answers"])
def test_a_later_plan_s_pull_replaces_one_that_waits_for_a_connection(found: str) -> None:
    """A plan asks for a cell from a node to which a connection is only being made. Meanwhile that
    node makes one, and the next plan, which goes on with the same cell, pulls over that by its own
    key: the older key must not be asked for after it, because nobody serves that any more."""
    called: list[Any] = []
    member = SimpleNamespace(node=7)
    peers: Any = SimpleNamespace(
        start=SimpleNamespace(tls=False),
        is_near=lambda number: False,
        by_number={7: SimpleNamespace(member=member)},
        call=lambda member, role, done: called.append(done),
    )
    node: Any = SimpleNamespace(
        client=SimpleNamespace(host_id=1),
        loop=ManualLoop(),
        trace_events=TraceEvents(ManualLoop(), UnhandledEvents()),
    )
    engine: Any = Recorder()
    links = Links(node, peers, engine)
    part = PlanState(links, [3, 4, 5])
    old, new = (1, 1, 0, 0), (1, 2, 0, 0)
    for cell in (3, 4, 5):
        links.pull(cell, 7, old, part)
    assert len(called) == 1, "one connection serves all that wait for it"
    buffer: Any = SimpleNamespace(closing=0)
    links.close(5, buffer)
    ours, theirs = tcp_pair()
    _connect(links, theirs)
    links.pull(3, 7, new, part)
    with ours:
        stream = SimpleNamespace(detach=lambda: ours)
        called[0](SimpleNamespace(stream=stream) if found == "our connection is made" else None)
    if found == "our connection is made":
        assert engine.pulls == [(3, new), (4, old)]
    else:
        assert engine.pulls == [(3, new)]
        assert part.heard == [("failed", 4, UNREACHABLE)]
