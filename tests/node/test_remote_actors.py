"""Actors of other hosts, where what is asked for has gone meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.actors.actor_records import WantedActor
from hoplite_mp._node.actors.remote_actors import RemoteActors
from hoplite_mp._node.questions import Questions
from hoplite_mp._protocol.actors import BindActor
from hoplite_mp._protocol.peers import BeginActor
from tests.support.node_actors import ActorNetwork
from tests.support.node_ports import ManualLoop

HOST_ID, NODE = 1001, 1


class Host:
    """What far actors use of their node, which has lost its link to the only other one."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.replies: list[Any] = []
        self.refusals: list[str] = []
        host: Any = SimpleNamespace(
            imports=SimpleNamespace(by_oid={}),
            client=SimpleNamespace(host_id=1000),
            tasks=None,
            roster=SimpleNamespace(by_number={NODE: SimpleNamespace(host_id=HOST_ID)}, leaving=()),
            reply=lambda slot, reply: self.replies.append(reply),
            send_peer=lambda host_id, message: False,
        )
        host.questions = Questions(ManualLoop(), host.roster, host.send_peer)
        actors: Any = SimpleNamespace(of=lambda identity: None, public=lambda oid: b"i" * 16)
        workers: Any = SimpleNamespace(open_bound=self.open_bound, why_none="no pool is free")
        none: Any = SimpleNamespace(runners={})
        self.far: Any = RemoteActors(host, actors, workers, none, none, none, none)

    def open_bound(self, owner: int, output_owner: int) -> int:
        self.opened.append(owner)
        return len(self.opened)

    def granted(self, hold: Any) -> None:
        raise AssertionError("there is no actor")

    def refused(self, why: str, gone: bool) -> None:
        assert gone
        self.refusals.append(why)


def test_an_identity_that_is_gone_takes_no_pool() -> None:
    host = Host()
    host.far.bind(2, 7, BindActor(1 << 40, 3, 0, 0, ()))
    assert "ended" in host.replies[0].error
    assert host.opened == []


def test_a_node_to_which_there_is_no_link_is_gone_at_once() -> None:
    host = Host()
    host.far.begin(host, WantedActor(1 << 40, b"", "Counter", "", 0, False, False, 0), NODE)
    assert host.refusals == ["its host was lost while the actor was to begin there"]
    assert not host.far.questions.open


def test_what_is_wanted_travels_in_the_order_of_its_fields() -> None:
    assert WantedActor._fields == BeginActor.__struct_fields__[1:]


@pytest.mark.parametrize("begun", [False, True])
def test_a_call_that_cannot_begin_holds_up_no_other(begun: bool) -> None:
    """There is no header for it, or no queue: its caller is told, and the next one runs."""
    network = ActorNetwork(2)
    caller, owner = network.sides
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
    owner.answer(owner.tasks.next(pool, 0), "ran")
    network.settle()
    for oid, wanted in ((first, "no room 1"), (second, "ran")):
        assert str(caller.value(caller.party.hold(oid))) == wanted
    assert not inbound_tasks.rows
    assert not inbound_tasks.by_task
    del made, found, handle
    network.close()


@pytest.mark.parametrize("begun", [False, True])
def test_a_host_that_leaves_waits_for_calls_to_its_own_actors(begun: bool) -> None:
    """Whether they wait here for their turn, or are under way."""
    host = Host()
    far, pool, other = host.far, 11, 12
    far.bound = {
        pool: SimpleNamespace(host_id=HOST_ID, ended=None),
        other: SimpleNamespace(host_id=HOST_ID + 2, ended=None),
    }
    far.client = SimpleNamespace(
        queued_in=lambda number, full: [] if begun or number != pool else [71]
    )
    far.tasks = SimpleNamespace(pool_of={71: pool}.__getitem__)
    far.outbound_tasks = SimpleNamespace(where={71: None} if begun else {})
    assert [far.has_calls(HOST_ID + more) for more in (-1, 0, 1, 2, 3)] == [
        False, True, False, False, False,
    ]  # fmt: skip
