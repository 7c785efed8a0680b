"""A call to another host in the node's loop: when it is turned, and how it ends."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._node.peers.peers import STARVED_S, PeerDialing
from hoplite_mp.errors import HopliteError
from tests.support.node_harness import member
from tests.support.node_ports import ManualLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.node_harness import NodeHarness

FD = 99
ADMISSION: Any = "a connection"


class Caller:
    """Has something to do each second; answers with what the test has put in."""

    def __init__(self, loop: ManualLoop) -> None:
        self.loop = loop
        self.turns: list[float] = []
        self.found: Any = None
        self.starved = False

    @property
    def deadline(self) -> float:
        return self.loop.time + 1.0

    def fileno(self) -> int:
        return FD

    def turn(self, now: float) -> Any:
        self.turns.append(now)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def wait(self) -> Any:
        raise NotImplementedError


class World:
    def __init__(self, *, waits: bool = True) -> None:
        self.loop = ManualLoop()
        self.caller = Caller(self.loop)
        self.ends: list[Any] = []
        self.made = 0
        self.call = PeerDialing(self.loop, self.make, "node h1", self.ends.append, waits=waits)

    def make(self) -> Caller:
        self.made += 1
        return self.caller


def test_call_runs_on_its_timer_and_on_incoming_data() -> None:
    world = World()
    world.call.begin()
    begun = world.loop.time
    world.loop.pass_to(begun + 0.9)
    assert world.caller.turns == [begun]
    world.loop.pass_to(begun + 1.0)
    assert world.caller.turns == [begun, begun + 1.0]
    world.caller.found = ADMISSION
    world.loop.watched[FD]()
    assert world.ends == [ADMISSION]
    assert not world.loop.watched


@pytest.mark.parametrize("found", [ADMISSION, HopliteError("nobody is there")])
def test_ended_call_ignores_its_earlier_timer(found: Any) -> None:
    world = World()
    world.call.begin()
    world.caller.found = found
    world.loop.watched[FD]()
    world.loop.pass_time(5.0)
    assert len(world.caller.turns) == 2
    assert world.ends == [found if found is ADMISSION else None]


@pytest.mark.parametrize("waits", [True, False])
def test_call_without_descriptors_restarts_only_if_it_waits(waits: bool) -> None:
    world = World(waits=waits)
    world.caller.found, world.caller.starved = OSError(errno.EMFILE, "no descriptor"), True
    world.call.begin()
    assert world.ends == ([] if waits else [None])
    world.caller.found = ADMISSION
    world.loop.pass_time(STARVED_S)
    assert world.made == (2 if waits else 1)
    assert world.ends == ([ADMISSION] if waits else [None])


def test_node_that_advertises_an_address_of_this_host_is_near(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node([member(1, addresses=("192.168.0.1:6000",)), member(2)])
    own = member(0, host_id=node.host_id, addresses=("10.0.0.1:5000", "192.168.0.1:5000"))
    node.join(own)
    assert [node.cluster.peers.is_near(number) for number in (1, 2, 3)] == [True, False, False]
