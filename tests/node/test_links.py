"""Data connections of a node: what is asked for while one ends."""

from __future__ import annotations

import select
import time
from types import SimpleNamespace
from typing import Any

from hoplite_mp import _engine
from hoplite_mp.node.membership.links import Links
from hoplite_mp.node.notes import Notes
from tests.node.manual_loop import ManualLoop
from tests.node.nobody_above import NobodyAbove
from tests.transport.helpers import tcp_pair

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


class PlanExecution:
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
        client=SimpleNamespace(home=1), loop=ManualLoop(), notes=Notes(ManualLoop(), NobodyAbove())
    )
    peers: Any = SimpleNamespace(
        start=SimpleNamespace(tls=False), is_near=lambda number: False, by_number={}
    )
    links = Links(node, peers, _engine.Engine(1))
    with ours:
        ours.setblocking(False)
        link = links.engine.connect(ours.fileno(), 7)
    links._count(link, 7)
    links.links[7] = link
    memory = bytearray(2 * NBYTES)
    cells = [links.engine.cell(None, memory, at * NBYTES, NBYTES) for at in range(2)]
    part = PlanExecution(links, cells)
    links.pull(cells[0], 7, (1, 1, 0, 0), part)
    while links.engine.watermark(cells[0]) < NBYTES:
        time.sleep(0.001)
    other.stop()
    links.engine = Late(links.engine)  # type: ignore[assignment]
    links.look()
    assert part.heard == [("filled", cells[0]), ("failed", cells[1], "the node is gone")]
    links.stop()
