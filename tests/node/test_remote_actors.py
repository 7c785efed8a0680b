"""Actors of other hosts, where what is asked for has gone meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import ids
from hoplite_mp._common.object_states import DRIVER_SLOT
from hoplite_mp._node.actors.actor_records import WantedActor
from hoplite_mp._protocol.actors import BindActor, OpenActor
from hoplite_mp._protocol.peers import StartRemoteActor
from tests.support.node_harness import member
from tests.support.node_hosts import Network

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

FIRST, SECOND = member(1).host_id, member(2).host_id


@pytest.fixture
def node(make_node: Callable[..., NodeHarness]) -> NodeHarness:
    return make_node([member(1), member(2)])


def test_ended_actor_gets_no_pool(node: NodeHarness) -> None:
    assert "ended" in node.answer(DRIVER_SLOT, BindActor(1 << 40, 3)).error
    assert list(node.parts.workers.pools) == [0]


@pytest.mark.parametrize("asked", [False, True])
def test_lost_node_cannot_start_an_actor(node: NodeHarness, asked: bool) -> None:
    """Before it is asked, or before it has answered."""
    setup = node.process(DRIVER_SLOT).put("setup")
    if not asked:
        node.lose(1)
    node.ask(DRIVER_SLOT, OpenActor(setup.oid, b"", "Counter", "", 0, False, False, 1))
    if asked:
        ((to, message),) = node.taken()
        assert (to, type(message)) == (FIRST, StartRemoteActor)
        node.lose(1)
    ((_, reply),) = node.replies()
    assert reply.gone
    why = "its host was lost while the actor was starting there" if asked else "node h1 is gone"
    assert reply.error == why
    assert not node.parts.questions.open


def test_actor_request_has_the_fields_of_its_message() -> None:
    assert WantedActor._fields == StartRemoteActor.__struct_fields__[1:]


@pytest.mark.parametrize("begun", [False, True])
def test_call_that_cannot_start_does_not_block_the_next(begun: bool) -> None:
    """There is no header for it, or no queue: its caller is told, and the next one runs."""
    network = Network(2)
    caller, owner = network.nodes
    setup, made = caller.put("setup")
    found = owner.hold(setup)
    network.pump()
    identity = owner.begin(setup)
    pool = owner.actor(identity).pool
    handle = caller.hold(identity)
    network.pump()
    calls = caller.bind(handle[0], pool)
    inbound_tasks, queue, fails = owner.inbound_tasks, owner.node_events.queue_of, [1]

    def fail_once(*args: Any) -> Any:
        if fails:
            raise MemoryError(f"no room {fails.pop()}")
        return queue(pool)

    if begun:
        owner.node_events.queue_of = fail_once
    else:
        new = inbound_tasks.client.new
        client = inbound_tasks.client

        class Client:
            def __getattr__(self, name: str) -> Any:
                return getattr(client, name)

            def new(self, *args: Any) -> Any:
                if fails:
                    raise MemoryError(f"no room {fails.pop()}")
                return new(*args)

        inbound_tasks.client = Client()  # type: ignore[assignment]
    first, second = (caller.submit(pool=calls, retries=0) for _ in range(2))
    network.settle()
    owner.complete(owner.tasks.next(pool, 0), "ran")
    network.settle()
    for oid, wanted in ((first, "no room 1"), (second, "ran")):
        assert str(caller.value(caller.party.hold(oid))) == wanted
    assert not inbound_tasks.rows
    assert not inbound_tasks.by_task
    del made, found, handle
    network.close()


@pytest.mark.parametrize("begun", [False, True])
def test_host_that_leaves_waits_for_calls_to_its_own_actors(node: NodeHarness, begun: bool) -> None:
    """Whether they wait here for their turn, or are under way."""
    driver, handles = node.process(DRIVER_SLOT), []
    node.parts.imports.ask([ids.pack_id(one, 1 << 33) for one in (FIRST, SECOND)], handles.extend)
    node.describe("the identity")
    pool, _ = (node.answer(DRIVER_SLOT, BindActor(one.oid, 3)).value for one in handles)
    call = driver.submit(pool)
    if begun:
        node.poll()
        assert call.oid in node.parts.outbound_tasks.where
    assert [node.cluster.remote_actors.has_calls(one) for one in (FIRST, SECOND, 1003)] == [
        True, False, False,
    ]  # fmt: skip
