"""Lines between a node and the processes of its host: requests, answers, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._client.channel import seqpacket_pair
from hoplite_mp._node.io.client_sockets import ClientSockets
from hoplite_mp._protocol.local import Members, Reply, Request
from tests.support.node_ports import ManualLoop

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

SLOT = 3


class Node:
    """Serves what is asked, or cannot."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.lines = ClientSockets(self.loop)
        self.lines.serve(self)
        self.requests: list[tuple[int, Request]] = []
        self.refused: list[tuple[object, str]] = []
        self.ended: list[int] = []
        self.error: Exception | None = None
        self.theirs = self.connect()

    def connect(self) -> socket.socket:
        ours, theirs = seqpacket_pair()
        theirs.setblocking(False)
        self.fd = ours.fileno()
        self.lines.add(SLOT, ours)
        return theirs

    def ask(self, request: Any) -> None:
        self.theirs.send(msgspec.msgpack.encode(request))
        self.loop.watched[self.fd]()

    def told(self) -> Reply:
        return msgspec.msgpack.decode(self.theirs.recv(1 << 12), type=Reply)

    # -- what the lines know as Above ----------------------------------------------------------

    def request(self, slot: int, request: Request, given: list[int]) -> None:
        if self.error is not None:
            raise self.error
        self.requests.append((slot, request))

    def line_ended(self, slot: int) -> None:
        self.ended.append(slot)

    def refuse_collective(self, ask: object, why: str) -> None:
        self.refused.append((ask, why))


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node()
    yield made
    made.theirs.close()
    made.lines.forget(SLOT)


def nothing_came(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1)
    except BlockingIOError:
        return True


def test_request_is_handled_and_answered(node: Node) -> None:
    node.ask(Request(5, 0, Members()))
    assert node.requests == [(SLOT, Request(5, 0, Members()))]
    node.lines.reply(SLOT, Reply(5, "all"))
    assert node.told() == Reply(5, "all")
    node.theirs.close()
    node.loop.watched[node.fd]()
    assert node.ended == [SLOT]
    assert not node.loop.watched


@pytest.mark.parametrize("kind", ["Collective", "Members"])
def test_request_that_raises_is_answered_with_the_error(node: Node, kind: str) -> None:
    """Of those that are not answered only an operation has somebody who waits: for its results."""
    node.error = ValueError("too much")
    node.ask([5, 0, [kind, "about"]])
    assert node.told().error.startswith("the node refused the request: ")
    node.ask([0, 0, [kind, "about"]])
    assert nothing_came(node.theirs)
    assert [ask for ask, _ in node.refused] == (["about"] if kind == "Collective" else [])


def test_late_reply_goes_only_to_the_requesting_process(node: Node) -> None:
    reply = node.lines.replier(SLOT)
    reply(Reply(5, "first"))
    assert node.told() == Reply(5, "first")
    node.lines.forget(SLOT)
    node.theirs.close()
    node.theirs = node.connect()  # another process has that slot now
    reply(Reply(6, "second"))
    assert nothing_came(node.theirs)
    nobody = node.lines.replier(SLOT + 1)
    nobody(Reply(7, "third"))
