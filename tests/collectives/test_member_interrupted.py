"""What a member gives to its node is held until it has left, and blocks that the node has not got
are given back, wherever a signal handler raises. What is raised comes out of the call."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hoplite_mp._group.call_protocol import CallProtocol
from hoplite_mp._group.multi_host import WRITE_ROUND_BYTES, MultiHost
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._protocol.local import GroupBlockWritten, GroupCall
from hoplite_mp.errors import NodeLostError

REF: Any = object()
AFTER = "_next_block", "_keep_own"  # what runs after the message to the node


class Member(MultiHost):
    """One that gives an object of the store; its node hears what it sends."""

    def __init__(self, at: str) -> None:
        self.sent: list[Any] = []
        self.small: Any = SimpleNamespace(give=lambda *about: False)
        self._in_place: Any = SimpleNamespace(ref=lambda array, lends: REF)
        self._channel: Any = SimpleNamespace(tell=lambda ask, sent: self.sent.append(ask))
        self._memory: Any = SimpleNamespace(local_id=lambda ref: 8, scan=None)
        self._generation = self.rank = 0
        self._large_roots = set()
        self._preallocated, self._given = (0, None), 0
        setattr(self, at, self.interrupt)

    def interrupt(self, *_: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("at", AFTER)
def test_part_that_is_interrupted_after_its_message_is_held(at: str) -> None:
    member = Member(at)
    held: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        member.give(3, ("allreduce", "sum", 0, [np.ones(9)]), False, True, held)
    (ask,) = member.sent
    assert ask.parts == [8]
    assert held == [REF]


class Lease:
    """As `_shm.Lease`: its memory is given back with it unless it is detached."""

    payload = 4096

    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.detached = False

    def detach(self) -> int:
        self.detached = True
        return self.payload

    def __del__(self) -> None:
        if not self.detached:
            self.events.append("given back")


class Writer(MultiHost):
    """One that gives a block, and is interrupted at the step of that name."""

    def __init__(self, at: str, error: BaseException) -> None:
        self.events: list[str] = []
        self.at, self.error = at, error
        self.sent: list[Any] = []
        self.small: Any = SimpleNamespace(give=lambda *about: False)
        self._in_place: Any = SimpleNamespace(ref=lambda array, lends: None)
        self._channel: Any = SimpleNamespace(tell=self.tell)
        client = SimpleNamespace(write=self.step("write"), give_back=self.give_back)
        self._memory: Any = SimpleNamespace(
            client=client,
            scan=None,
            allocate=lambda nbytes: Lease(self.events),
            preallocate=lambda nbytes: None,
            config=SimpleNamespace(small_object_bytes_max=1 << 16),
        )
        self._generation = self.rank = 0
        self.size = 2
        self._large_roots = set()
        self._rates = deque()
        self._preallocated, self._given = (0, None), 0

    def step(self, name: str) -> Any:
        def step(*_: Any) -> None:
            if self.at == name:
                self.at = ""
                raise self.error

        return step

    def tell(self, ask: Any, sent: list[int] | None = None) -> None:
        self.step("before")()
        self.sent.append(ask)
        if sent is not None:
            sent.append(1)
        self.step("after")()

    def give_back(self, payload: int) -> None:
        assert payload == Lease.payload
        self.events.append("given back")


def give(member: MultiHost, nbytes: int) -> None:
    member.give(3, ("allreduce", "sum", 0, [np.ones(nbytes // 8)]), False, True, [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()])
@pytest.mark.parametrize("at", ["write", "before"])
@pytest.mark.parametrize("nbytes", [1 << 20, 3 * WRITE_ROUND_BYTES])
def test_block_that_is_interrupted_before_its_message_is_given_back(
    at: str, nbytes: int, error: BaseException
) -> None:
    member = Writer(at, error)
    with pytest.raises(type(error)):
        give(member, nbytes)
    assert member.events == ["given back"]
    assert member.sent == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TimeoutError()])
@pytest.mark.parametrize("at", ["after", "clock"])
@pytest.mark.parametrize("nbytes", [1 << 20, 3 * WRITE_ROUND_BYTES])
def test_block_that_is_interrupted_after_its_message_is_the_nodes(
    monkeypatch: pytest.MonkeyPatch, at: str, nbytes: int, error: BaseException
) -> None:
    """What was not written by then is never reported as written: the rank leaves."""
    member = Writer(at, error)
    clock = member.step("clock")
    monkeypatch.setattr("hoplite_mp._common.clock.monotonic", lambda: clock() or 1.0)
    with pytest.raises(type(error)):
        give(member, nbytes)
    assert member.events == []
    call, *rest = member.sent
    assert type(call) is GroupCall
    assert rest == []
    (payload, size, first) = call.parts[0]
    assert payload == Lease.payload
    assert (first == size) == (nbytes == 1 << 20)


def test_block_that_is_not_interrupted_is_written_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Writer("", KeyboardInterrupt())
    give(member, 3 * WRITE_ROUND_BYTES)
    call, *rest = member.sent
    written = Ranges()
    (payload, size, first) = call.parts[0]
    written.add(0, first)
    for one in rest:
        assert (type(one), one.payload) == (GroupBlockWritten, payload)
        for begin, end in one.ranges:
            written.add(begin, end)
    assert written.reach(0, size) == size


def test_mistake_that_is_interrupted_while_it_is_given_raises() -> None:
    """The mistake may not have been sent, so nobody may wait for the end of the call."""
    errors = [TypeError("cannot be written"), KeyboardInterrupt()]

    def give(*_: Any) -> None:
        raise errors.pop(0)

    member: Any = SimpleNamespace(
        _hosts=SimpleNamespace(give=give), _part=None, _lends=True, _gets=True, rank=0
    )
    member._mistake = lambda error: CallProtocol._mistake(member, error)
    with pytest.raises(KeyboardInterrupt):
        CallProtocol._publish(member, 3, ("allgather", "", 0, [1]))
    assert errors == []


@pytest.mark.parametrize("error", [ValueError("it is too large"), NodeLostError("it has ended")])
def test_a_block_whose_message_cannot_be_sent_is_given_back(error: Exception) -> None:
    member = Writer("before", error)
    with pytest.raises(type(error)):
        give(member, 1 << 20)
    assert member.events == ["given back"]
    assert member.sent == []
