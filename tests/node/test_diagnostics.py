"""What a node says of itself to people: traces, waits, calls that wait, cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.actors.actor_status import calls_from_here
from hoplite_mp._node.diagnostics.tracing import Tracing
from hoplite_mp._node.diagnostics.waits import WaitReports
from hoplite_mp._node.groups.groups import group_waits
from hoplite_mp._node.questions import Questions
from hoplite_mp._node.roster import Roster
from hoplite_mp._protocol.diagnostics import DumpAsked, LookTold, TraceAsked, TraceRead
from hoplite_mp._protocol.local import Dump, Request
from hoplite_mp._protocol.messages import Member
from tests.support.lost_peers import gone
from tests.support.node_ports import ManualLoop

NUMBER, OWNER, OTHER = 3, 1001, 2002
SLOT = 5
TRACE = 1 << 40


class World:
    """A node beside two others."""

    def __init__(self) -> None:
        self.loop = ManualLoop()
        self.sent: list[tuple[int, Any]] = []
        self.replies: list[Any] = []
        self.lines: dict[int, Any] = {SLOT: "a line"}
        self.roster = Roster()
        for number, host_id in ((1, OWNER), (2, OTHER)):
            self.roster.add(Member(number, 1, host_id, 4))
        self.questions = Questions(self.loop, self.roster, self.send)
        self.host: Any = SimpleNamespace(
            loop=self.loop,
            client=SimpleNamespace(number=NUMBER, host_id=77),
            clients=self.lines,
            tasks=SimpleNamespace(name=lambda oid: "f", submitted_ns=lambda oid: 0),
            remote_objects=None,
            imports=SimpleNamespace(public=lambda oid: bytes([oid])),
            roster=self.roster,
            reply=lambda slot, reply: self.replies.append((slot, reply.value)),
            replier=None,
            send_peer=self.send,
            questions=self.questions,
        )

    def send(self, host_id: int, message: Any) -> bool:
        self.sent.append((host_id, message))
        return True

    def said(self) -> list[tuple[int, Any]]:
        sent, self.sent = self.sent, []
        return sent


def test_a_trace_is_read_by_the_host_that_has_begun_it_and_only_that_one() -> None:
    world = World()
    recording: Any = SimpleNamespace(start=lambda: None, document=b"events")
    tracing = Tracing(world.host, recording)
    tracing.asked(OWNER, TraceAsked(1, TRACE, "begin"))
    assert world.said() == [(OWNER, LookTold(1))]
    for host_id, trace, data in (
        (OWNER, TRACE, b"events"),
        (OWNER, TRACE + 1, b""),
        (OTHER, TRACE, b""),
    ):
        tracing.read(host_id, TraceRead(2, trace, 0))
        assert world.said() == [(host_id, LookTold(2, data=data))]


def waits(world: World) -> WaitReports:
    nobody: Any = None
    outbound_tasks: Any = SimpleNamespace(where={7: SimpleNamespace(number=2)})
    return WaitReports(world.host, nobody, nobody, outbound_tasks, nobody, nobody, nobody, nobody)


def test_a_task_that_was_sent_says_where_it_is() -> None:
    (found,) = waits(World())._sent()
    assert (found["name"], found["id"], found["to"]) == ("f", "07", "h2")


@pytest.mark.parametrize("died", [False, True])
def test_a_dump_goes_to_the_process_that_has_asked(died: bool) -> None:
    """Which hosts have answered, with how much, and which have not."""
    world = World()
    room = waits(world)
    room.collect = lambda stacks, done: done(b"own")  # type: ignore[method-assign]
    room.ask(SLOT, Request(4, 0, Dump(False)))
    asked = dict(world.said())
    assert asked == {host_id: DumpAsked(asked[host_id].number, False) for host_id in (OWNER, OTHER)}
    if died:
        world.lines[SLOT] = "another process"
    world.questions.answered(OWNER, LookTold(asked[OWNER].number, data=b"theirs"))
    assert not world.replies
    world.questions.peer_lost(gone(OTHER))
    assert world.replies == ([] if died else [(SLOT, ([(1, 6), (NUMBER, 3)], [2]))])
    assert room.dumps == ({} if died else {SLOT: {1: b"theirs", NUMBER: b"own"}})


def test_calls_that_wait_for_an_actor_elsewhere() -> None:
    """Of one that has no place now it is not said where."""
    roster = Roster()
    roster.add(Member(2, 1, OTHER, 4))
    far: Any = SimpleNamespace(
        client=SimpleNamespace(queued_counts=lambda: {10: 3, 11: 1}),
        bound={pool: SimpleNamespace(host_id=OTHER, identity=pool) for pool in (10, 11, 12)},
        outbound_tasks=SimpleNamespace(far={10: [], 12: []}),
        roster=roster,
        actors=SimpleNamespace(public=lambda identity: bytes([identity])),
    )
    assert [*calls_from_here(far)] == [
        {"identity": "0a", "waiting": 3, "at": "h2"},
        {"identity": "0b", "waiting": 1, "at": ""},
    ]


def test_members_of_a_group_here_and_elsewhere() -> None:
    """Only the boards of their own hosts know their processes."""
    here, there = 0, 1
    state: Any = SimpleNamespace(
        members=SimpleNamespace(nodes=[here, there, None]),
        calls=0,
        leader=None,
        owned=False,
        member_calls={},
        ranks_of=lambda number: {},
    )
    board: Any = SimpleNamespace(
        look=lambda: (True, 0b111, 0, 0, 0, 0), member=lambda rank: (0, 0, 0, 20 + rank)
    )
    known: Any = SimpleNamespace(name="g", generation=1, board=board, shown=SimpleNamespace(size=3))
    groups: Any = SimpleNamespace(known={1: known}, hosts=SimpleNamespace(states={1: state}))
    messages: Any = SimpleNamespace(unread=lambda generation: [])
    client: Any = SimpleNamespace(number=here)
    tasks: Any = SimpleNamespace(pid=lambda slot: 1000 + slot)
    (found,) = group_waits(groups, messages, client, tasks)
    assert found["came"] == [
        {"rank": 0, "node": here, "pid": 1020},
        {"rank": 1, "node": there, "pid": 0},
        {"rank": 2, "node": here, "pid": 1022},
    ]
