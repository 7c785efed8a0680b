"""What a member gives to its node is held until it has left, and blocks that the node has not got
are given back, wherever a signal handler raises. What is raised comes out of the call."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from hoplite_mp._group.call_protocol import CallProtocol
from hoplite_mp._group.multi_host import WRITE_ROUND_BYTES, MultiHost
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._protocol.local import GroupBlockWritten, GroupCall
from hoplite_mp.config import Config
from hoplite_mp.errors import NodeLostError

REF: Any = object()
AFTER = "_next_block", "_keep_own"  # what runs after the message to the node


class Process:
    """What a member has from its process: the memory, the line to the node, and the engine's calls,
    which do not take this one. `lies`: the ref of an array that lies in the store."""

    scan = None
    config = Config(small_object_bytes_max=1 << 16)

    def __init__(self, lies: Any = None) -> None:
        self.lies = lies
        self.client = self
        self.events: list[str] = []
        self.sent: list[Any] = []

    def give(self, *about: Any) -> bool:
        return False

    def ref(self, array: Any, lends: bool) -> Any:
        return self.lies

    def local_id(self, ref: Any) -> int:
        return 8

    def allocate(self, nbytes: int) -> Lease:
        return Lease(self.events)

    def preallocate(self, nbytes: int) -> None:
        return None

    def write(self, *about: Any) -> None: ...

    def give_back(self, payload: int) -> None:
        assert payload == Lease.payload
        self.events.append("given back")

    def tell(self, ask: Any, sent: list[int] | None = None) -> None:
        self.sent.append(ask)
        if sent is not None:
            sent.append(1)


class ProcessMember(MultiHost):
    """A member of a process, with no engine, node or cluster."""

    def __init__(self, process: Any) -> None:
        self.small = self._in_place = self._channel = self._memory = process
        self._generation = self.rank = 0
        self.size = 2
        self._large_roots = set()
        self._rates = deque()
        self._preallocated, self._given = (0, None), 0


class Member(ProcessMember):
    """One that gives an object of the store, and is interrupted in that method."""

    def __init__(self, at: str) -> None:
        process = Process(REF)
        super().__init__(process)
        self.sent = process.sent
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


class InterruptedProcess(Process):
    """It is interrupted at the step of that name: while a block is written, before a message is
    sent, or after that."""

    def __init__(self, at: str, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def step(self, name: str) -> None:
        if self.at == name:
            self.at = ""
            raise self.error

    def write(self, *about: Any) -> None:
        self.step("write")

    def tell(self, ask: Any, sent: list[int] | None = None) -> None:
        self.step("before")
        super().tell(ask, sent)
        self.step("after")


class Writer(ProcessMember):
    """One that gives a block, and is interrupted at the step of that name."""

    def __init__(self, at: str, error: BaseException) -> None:
        self.process = process = InterruptedProcess(at, error)
        super().__init__(process)
        self.events, self.sent = process.events, process.sent


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

    def monotonic() -> float:
        member.process.step("clock")
        return 1.0

    monkeypatch.setattr("hoplite_mp._common.clock.monotonic", monotonic)
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

    hosts: Any = ProcessMember(Process())
    hosts.give = give
    member = object.__new__(CallProtocol)
    member._hosts, member._part, member._lends, member._gets = hosts, None, True, True
    member.rank = 0
    with pytest.raises(KeyboardInterrupt):
        member._publish(3, ("allgather", "", 0, [1]))
    assert errors == []


@pytest.mark.parametrize("error", [ValueError("it is too large"), NodeLostError("it has ended")])
def test_a_block_whose_message_cannot_be_sent_is_given_back(error: Exception) -> None:
    member = Writer("before", error)
    with pytest.raises(type(error)):
        give(member, 1 << 20)
    assert member.events == ["given back"]
    assert member.sent == []
