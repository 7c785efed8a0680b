"""What a node says of itself to people: traces, waits, calls that wait, cells."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._node.actors.remote_actors import RemoteActors
from hoplite_mp._node.groups.groups import group_waits
from hoplite_mp._node.roster import Roster
from hoplite_mp._protocol.diagnostics import DumpAsked, LookTold, TraceAsked, TraceRead
from hoplite_mp._protocol.local import Dump, DumpRead
from hoplite_mp._protocol.messages import Member
from hoplite_mp._protocol.peers import RunTask
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

NUMBER, OWNER, OTHER = 3, member(1).host_id, member(2).host_id
TRACE = 1 << 40


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    """A node beside two others."""
    return make_node([member(1), member(2)], number=NUMBER)


def test_trace_is_read_by_the_host_that_has_begun_it_and_only_that_one(node: NodeHarness) -> None:
    node.receive(OWNER, TraceAsked(1, TRACE, "begin"))
    node.receive(OWNER, TraceAsked(2, TRACE, "end"))
    begun, ended = node.taken()
    assert begun == (OWNER, LookTold(1))
    for host_id, trace, is_read in (
        (OWNER, TRACE, True),
        (OWNER, TRACE + 1, False),
        (OTHER, TRACE, False),
    ):
        node.receive(host_id, TraceRead(2, trace, 0))
        ((to, told),) = node.taken()
        assert to == host_id
        assert len(told.data) == (ended[1].value if is_read else 0)


def test_task_that_was_sent_says_where_it_is(node: NodeHarness) -> None:
    task = node.process(DRIVER_SLOT).submit()
    node.poll()
    ((to, sent),) = [(to, one) for to, one in node.taken() if isinstance(one, RunTask)]
    (found,) = node.parts.waits.gather()["sent"]["first"]
    assert (found["name"], found["id"]) == ("f", sent.task.hex())
    assert found["to"] == f"h{to - 1000}"
    del task


@pytest.mark.parametrize("died", [False, True])
def test_dump_goes_to_the_process_that_has_asked(node: NodeHarness, died: bool) -> None:
    """Which hosts have answered, with how much, and which have not."""
    number = node.ask(DRIVER_SLOT, Dump(False))
    asked = dict(node.taken())
    assert asked == {host_id: DumpAsked(asked[host_id].number, False) for host_id in (OWNER, OTHER)}
    if died:
        node.connect(DRIVER_SLOT)  # another process is there now
    node.receive(OWNER, LookTold(asked[OWNER].number, data=b"theirs"))
    assert not node.replies()
    node.lose(2)
    if died:
        assert not node.replies()
        assert not node.parts.waits.dumps
        return
    ((slot, reply),) = node.replies()
    (others, (own, nbytes)), silent = reply.value
    assert (slot, reply.number, others, own, silent) == (DRIVER_SLOT, number, (1, 6), NUMBER, [2])
    assert node.answer(DRIVER_SLOT, DumpRead(1, 0)).value == b"theirs"
    mine = node.answer(DRIVER_SLOT, DumpRead(NUMBER, 0)).value
    assert len(mine) == nbytes
    assert msgspec.msgpack.decode(mine)["node"] == NUMBER


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
    assert [*RemoteActors.waits(far)] == [
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
