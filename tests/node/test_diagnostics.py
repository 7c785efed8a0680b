"""What a node says of itself to people: traces, waits, calls that wait, cells."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._protocol.actors import BindActor
from hoplite_mp._protocol.diagnostics import (
    DiagnosticsResponse,
    DumpRequest,
    TraceReadRequest,
    TraceRequest,
)
from hoplite_mp._protocol.local import Dump, DumpRead
from hoplite_mp._protocol.messages import GroupMembers
from hoplite_mp._protocol.peers import RunTask
from tests.support.messages import WHOLE
from tests.support.node_harness import FIRST_PID, member

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

NUMBER, OWNER, OTHER = 3, member(1).host_id, member(2).host_id
TRACE = 1 << 40


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    """A node beside two others."""
    return make_node([member(1), member(2)], number=NUMBER)


def test_trace_is_read_only_by_the_host_that_started_it(node: NodeHarness) -> None:
    node.receive(OWNER, TraceRequest(1, TRACE, "begin"))
    node.receive(OWNER, TraceRequest(2, TRACE, "end"))
    begun, ended = node.taken()
    assert begun == (OWNER, DiagnosticsResponse(1))
    for host_id, trace, is_read in (
        (OWNER, TRACE, True),
        (OWNER, TRACE + 1, False),
        (OTHER, TRACE, False),
    ):
        node.receive(host_id, TraceReadRequest(2, trace, 0))
        ((to, told),) = node.taken()
        assert to == host_id
        assert len(told.data) == (ended[1].value if is_read else 0)


def test_sent_task_is_listed_with_its_host(node: NodeHarness) -> None:
    task = node.process(DRIVER_SLOT).submit()
    node.poll()
    ((to, sent),) = [(to, one) for to, one in node.taken() if isinstance(one, RunTask)]
    (found,) = node.parts.waits.gather()["sent"]["first"]
    assert (found["name"], found["id"]) == ("f", sent.task.hex())
    assert found["to"] == f"h{to - 1000}"
    del task


@pytest.mark.parametrize("died", [False, True])
def test_dump_is_returned_to_the_requesting_process(node: NodeHarness, died: bool) -> None:
    """Which hosts have answered, with how much, and which have not."""
    number = node.ask(DRIVER_SLOT, Dump(False))
    asked = dict(node.taken())
    assert asked == {
        host_id: DumpRequest(asked[host_id].number, False) for host_id in (OWNER, OTHER)
    }
    if died:
        node.connect(DRIVER_SLOT)  # another process is there now
    node.receive(OWNER, DiagnosticsResponse(asked[OWNER].number, data=b"theirs"))
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


def test_calls_waiting_for_remote_actors_are_listed_with_their_hosts(node: NodeHarness) -> None:
    """Of one that has no place now it is not said where."""
    driver, handles = node.process(DRIVER_SLOT), []
    identities = [ids.pack_id(OTHER, number << 33) for number in (1, 2, 3)]
    node.parts.imports.ask(identities, handles.extend)
    node.describe("the identity")
    pools = [node.answer(DRIVER_SLOT, BindActor(one.oid, 3)).value for one in handles]
    calls = [driver.submit(pools[at]) for at in (0, 0, 0, 1)]
    node.parts.outbound_tasks.forget_pool(pools[1])
    assert [*node.cluster.remote_actors.waits()] == [
        {"identity": identities[0].hex(), "waiting": 3, "at": "h2"},
        {"identity": identities[1].hex(), "waiting": 1, "at": ""},
    ]
    del calls


def test_group_members_are_listed_with_local_process_ids(node: NodeHarness) -> None:
    """Only the boards of their own hosts know their processes."""
    nodes = (NUMBER, 1, None, NUMBER)
    shown = GroupMembers("g", 1, 0, 4, 0b1011, 0, False, 1, nodes, WHOLE)
    node.from_manager(shown)
    board = node.parts.groups.known[0].board
    for rank, slot in ((0, DRIVER_SLOT), (1, DRIVER_SLOT), (3, node.process().slot)):
        board.set_client(rank, slot)
        node.node_tasks.set_pid(slot, FIRST_PID + slot)
    (found,) = node.parts.waits.gather()["groups"]["first"]
    assert found["joined"] == [
        {"rank": 0, "node": NUMBER, "pid": FIRST_PID + DRIVER_SLOT},
        {"rank": 1, "node": 1, "pid": 0},
        {"rank": 3, "node": NUMBER, "pid": FIRST_PID + slot},
    ]
