"""Lines on their way: cut out of bytes, held, dropped and counted, sent to a driver elsewhere."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from hoplite_mp._node.io.driver_socket import DriverSocket
from hoplite_mp._node.io.epoll_loop import EpollLoop
from hoplite_mp._node.output.output import BACKLOG_BYTES_MAX, DRAIN_BYTES_MAX, LineSplitter, Output
from hoplite_mp._node.output.remote_output import RemoteOutput
from hoplite_mp._protocol import output as words
from hoplite_mp._protocol.codec import Decoder, encode
from hoplite_mp._protocol.output import OutputLines, mark
from hoplite_mp._protocol.peers import PeerMessage
from hoplite_mp._worker.stdio import OutputRouting
from hoplite_mp.config import Config
from hoplite_mp.errors import ConfigError
from tests.support.lost_peers import gone
from tests.support.node_ports import split_in_pieces
from tests.support.processes import exit_code_of, fork_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
HOST_ID, ANNA, BERT = 0x1234_5678_9ABC_DEF0, 0x0A0A_0A0A_0A0A_0A0A, (1 << 64) - 1

# -- pipes and sockets -------------------------------------------------------------------------


class Side:
    """The output of one node, and its driver; messages to others lie in `sent`."""

    def __init__(self, host_id: int, number: int, patience_s: float | None = None) -> None:
        self.host_id, self.number = host_id, number
        self.driver, end = socket.socketpair()
        self.loop = EpollLoop()
        self.output = Output(end, Config(), host_id, lambda: number, self.loop, patience_s, self)
        self.ended: list[int] = []
        self.data = b""
        self.sent: deque[tuple[int, bytes]] = deque()
        self.numbers: dict[int, int] = {}
        self.busy: set[int] = set()
        self.far = RemoteOutput(
            self.output,
            self.send,
            self.numbers.get,
            lambda name: name if name in self.numbers else None,
            self.busy.__contains__,
            lambda: None,
        )

    def send(self, host_id: int, message: PeerMessage) -> bool:
        if host_id in self.numbers:
            self.sent.append((host_id, encode(message)))  # type: ignore[arg-type]
        return host_id in self.numbers

    def take(self, peer: int, message: Any) -> None:
        match message:
            case OutputLines():
                self.far.printed(peer, message)
            case words.OutputAck():
                self.far.taken(peer, message)
            case words.OutputFlushRequest():
                self.far.last_lines_asked(peer, message)
            case words.OutputFlushed():
                self.far.last_lines_sent(peer, message)

    def remote_subscriber(self, output_owner: int) -> Any:
        return self.far.subscriber(output_owner)

    def worker(self, slot: int, output_owner: int = 0) -> Pipes:
        return Pipes(self, slot, output_owner)

    def turn(self) -> None:
        """One round of a loop that never waits."""
        self.loop.call_due()
        self.loop.serve(self.loop.wait(0))
        self.far.poll()

    def read(self, nbytes: int = 1 << 20) -> list[tuple[int, str, bytes]]:
        """What the driver reads now: whole lines."""
        with contextlib.suppress(BlockingIOError):
            self.data += self.driver.recv(nbytes, socket.MSG_DONTWAIT)
        found = []
        while len(self.data) >= 4:
            size = int.from_bytes(self.data[:4], "little")
            if len(self.data) < 4 + size:
                break
            found.append(
                msgspec.msgpack.decode(self.data[4 : 4 + size], type=tuple[int, str, bytes])
            )
            self.data = self.data[4 + size :]
        return found

    def close(self) -> None:
        self.driver.close()
        for fd in list(self.output.pipes):
            self.output.drain(fd)
        self.output.drivers[0][1].sock.close()


class Pipes:
    """A worker's stdout and stderr."""

    def __init__(self, side: Side, slot: int, output_owner: int) -> None:
        self.side = side
        self.reads, self.writes = zip(*(os.pipe() for _ in range(2)), strict=True)
        for stream, fd in enumerate(self.reads, 1):
            side.output.add(fd, stream, slot, output_owner, side.ended.append)
        for fd in self.writes:
            os.set_blocking(fd, False)

    def write(self, data: bytes, stream: int = 1) -> int:
        """How much of it has room."""
        try:
            return os.write(self.writes[stream - 1], data)
        except BlockingIOError:
            return 0

    def turn_to(self, output_owner: int) -> None:
        for fd in self.writes:
            os.write(fd, mark(self.side.host_id, output_owner))

    def die(self) -> None:
        for fd in self.writes:
            os.close(fd)
        for fd in self.reads:
            self.side.output.drain(fd)


@pytest.fixture
def sides() -> Iterator[Callable[..., list[Side]]]:
    made: list[Side] = []

    def make(count: int, patience_s: float | None = None) -> list[Side]:
        made.extend(Side(HOST_ID + (n << 20), n, patience_s) for n in range(count))
        for side in made:
            side.numbers.update(
                {other.host_id: other.number for other in made if other is not side}
            )
        return made

    yield make
    for side in made:
        side.close()


def pump(sides: list[Side], rounds: int = 20) -> None:
    decoders = {side.host_id: Decoder(PeerMessage) for side in sides}
    for _ in range(rounds):
        for side in sides:
            side.turn()
            while side.sent:
                host_id, frame = side.sent.popleft()
                (message,) = decoders[host_id].feed(frame)
                next(other for other in sides if other.host_id == host_id).take(
                    side.host_id, message
                )


def test_lines_for_two_drivers_go_to_two_hosts(sides: Any) -> None:
    first, second = both = sides(2)
    worker = first.worker(5)
    worker.write(b"mine\nmine to")
    worker.turn_to(second.host_id)
    worker.write(b"yours\n")
    worker.write(b"problem\n", 2)
    worker.turn_to(0)
    worker.write(b"mine again\n")
    pump(both)
    assert first.read() == [
        (1, "worker 5@h0", b"mine"),
        (1, "worker 5@h0", b"mine to"),
        (1, "worker 5@h0", b"mine again"),
    ]
    assert sorted(second.read()) == [
        (1, "worker 5@h0", b"yours"),
        (2, "worker 5@h0", b"problem"),
    ]
    os.close(worker.writes[0])
    os.close(worker.writes[1])


def test_unread_output_is_bounded_and_stays_in_order(sides: Any) -> None:
    """Pipes fill up, and everything comes in order when it reads at last."""
    first, second = both = sides(2)
    worker = first.worker(3, output_owner=second.host_id)
    line = b"%09d" + b"x" * 90 + b"\n"
    written, more = b"", b""
    number = idle = 0
    while idle < 50:
        more = more or b"".join(line % (10 * number + one) for one in range(10))
        count = worker.write(more)
        written, more = written + more[:count], more[count:]
        number += not more
        idle = 0 if count else idle + 1
        pump(both, 1)
    waits = first.far.subscribers[second.host_id].waiting
    assert waits >= words.REMOTE_BYTES_MAX
    # Beyond that: two pieces of one read, the pipe, and what the kernel gives the socket.
    assert len(written) < words.REMOTE_BYTES_MAX + (1 << 19)
    found: list[bytes] = []
    while (got := second.read()) or first.output.held or second.output.drivers[0][1].backlog:
        found += [text + b"\n" for _, _, text in got]
        pump(both, 1)
    pump(both)
    found += [text + b"\n" for _, _, text in second.read()]
    worker.die()
    pump(both)
    found += [text for _, _, text in second.read()]
    assert b"".join(found) == written


def test_driver_that_does_not_read_delays_no_other_driver(sides: Any) -> None:
    """One pipe has lines for two drivers, the first of which does not read."""
    first, second, third = everybody = sides(3, patience_s=0.05)
    worker = first.worker(3, output_owner=second.host_id)
    written = 0
    deadline = time.monotonic() + PATIENCE_S
    while not (
        second.host_id in first.far.subscribers and first.far.subscribers[second.host_id].stuck
    ):
        assert time.monotonic() < deadline
        written += worker.write(b"to deaf ears\n" * 100) // 13  # all of them, or none
        pump(everybody, 1)
    assert not first.output.held
    worker.turn_to(third.host_id)
    worker.write(b"who listens\n")
    pump(everybody)
    assert third.read() == [(1, "worker 3@h0", b"who listens")]
    lines: list[bytes] = []
    while not lines or b"dropped" not in lines[-1]:
        assert time.monotonic() < deadline
        lines += [text for _, _, text in second.read()]
        pump(everybody, 1)
    kept = lines.count(b"to deaf ears")
    assert kept + 1 == len(lines)
    assert lines[-1].startswith(f"{written - kept} lines were dropped here".encode())
    worker.die()


def test_last_lines_are_requested_from_all_hosts(sides: Any) -> None:
    """Also of a host that only the first one knows to have run tasks of this driver."""
    first, second, third = everybody = sides(3)
    one, two = (
        first.worker(3, output_owner=third.host_id),
        second.worker(4, output_owner=third.host_id),
    )
    first.far.sent_on(third.host_id, second.host_id)
    first.far.sent_on(third.host_id, third.host_id)  # some go back to where they come from
    first.far.sent_on(ANNA, second.host_id)  # gone
    assert list(first.far.others) == [third.host_id]
    one.write(b"no end")
    two.write(b"none here either", 2)
    pump(everybody)
    assert third.read() == []
    third.far.ask_last_lines([first.host_id])
    assert not third.far.quiet
    pump(everybody)
    assert third.far.quiet
    assert sorted(third.read()) == [
        (1, "worker 3@h0", b"no end"),
        (2, "worker 4@h1", b"none here either"),
    ]
    one.die()
    two.die()


def test_last_lines_wait_for_space(sides: Any) -> None:
    first, second = both = sides(2)
    worker = first.worker(3, output_owner=second.host_id)
    for _ in range(100):
        worker.write(b"y" * 8191 + b"\n")
        pump(both, 1)
    assert first.output.held
    second.far.ask_last_lines([first.host_id])
    pump(both)
    assert not second.far.quiet
    deadline = time.monotonic() + PATIENCE_S
    while not second.far.quiet:
        assert time.monotonic() < deadline
        second.read()
        pump(both, 1)
    assert not first.output.held
    worker.die()


def test_lines_for_a_dead_driver_are_dropped(sides: Any) -> None:
    """A worker without a task speaks to its own host then; one with a task is still the dead's."""
    first, second = both = sides(2)
    idle, runs = (
        first.worker(3, output_owner=second.host_id),
        first.worker(4, output_owner=second.host_id),
    )
    first.busy.add(4)
    for worker in (idle, runs):
        worker.write(b"for the dead\nand the rest")
    for worker in (idle, runs):
        while worker.write(b"z" * 4095 + b"\n"):
            pump(both, 1)
    assert len(first.output.held) == 2
    del first.numbers[second.host_id]
    first.far.peer_lost(gone(second.host_id))
    assert not first.output.held
    idle.write(b"to myself\n")
    runs.write(b"to nobody\n")
    pump([first])
    assert first.read() == [(1, "worker 3@h0", b"to myself")]
    idle.die()
    runs.die()


def test_lines_of_a_dead_worker_wait_for_space(sides: Any) -> None:
    (side,) = sides(1)
    worker, other = side.worker(3), side.worker(4)
    total = 0
    while not side.output.held:
        assert total < 4 * BACKLOG_BYTES_MAX
        total += worker.write(b"w" * 4095 + b"\n")
        side.turn()
    total += worker.write(b"last words")
    fds = set(worker.reads)
    worker.die()
    assert side.output.held
    assert not fds & set(side.output.pipes)
    other.write(b"later\n", 2)
    deadline = time.monotonic() + PATIENCE_S
    lines: list[bytes] = []
    while not lines or not side.output.quiet:
        assert time.monotonic() < deadline
        lines += [text for _, _, text in side.read()]
        side.turn()
    lines += [text for _, _, text in side.read()]
    assert b"last words" in lines
    assert b"later" in lines
    assert sum(len(text) + 1 for text in lines if text != b"later") == total + 1
    other.die()


def test_full_pipe_is_read_before_the_end_of_a_task(sides: Any) -> None:
    """Before the end of a task is told: more than one read."""
    import fcntl

    first, second = both = sides(2)
    worker = first.worker(3, output_owner=second.host_id)
    fcntl.fcntl(worker.writes[0], fcntl.F_SETPIPE_SZ, DRAIN_BYTES_MAX // 4)
    count = 0
    while worker.write(b"v" * 1023 + b"\n"):
        count += 1
    assert count > 100
    first.output.catch_up(worker.reads[0])
    first.output.catch_up(10_000)  # it has ended meanwhile
    lines = [Decoder(PeerMessage).feed(frame)[0] for _, frame in first.sent]
    assert sum(len(message.lines) for message in lines) == count  # type: ignore[union-attr]
    pump(both)
    worker.die()


def test_output_is_routed_after_descriptors_1_and_2_change() -> None:
    """In a process of its own, whose stdout is a pipe."""
    read, write = os.pipe()

    def speak() -> None:
        os.dup2(write, 1)
        os.dup2(write, 2)
        voice = OutputRouting(HOST_ID, 0)
        os.write(1, b"mine\nhalf")
        voice.turn_to(0)  # whom it serves first
        voice.turn_to(0)  # no news
        voice.turn_to(ANNA)
        os.close(1)
        voice.turn_to(BERT)
        os.write(2, b"yours\n")

    pid = fork_child(speak)
    os.close(write)
    data = b""
    while piece := os.read(read, 4096):
        data += piece
    os.close(read)
    assert exit_code_of(pid) == 0
    marks = [2 * mark(HOST_ID, output_owner) for output_owner in (0, ANNA, BERT)]
    assert data == b"mine\nhalf" + b"".join(marks) + b"yours\n"
    lines = LineSplitter(HOST_ID, 100)
    assert split_in_pieces(lines, data, []) == [(0, b"mine"), (0, b"half"), (BERT, b"yours")]
    assert lines.served == {0, ANNA, BERT}


# -- the words ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"slot": -1},
        {"slot": 256},
        {"stream": 0},
        {"stream": 3},
        {"lines": []},
        {"lines": [bytes(words.PRINTED_BYTES_MAX + 1)]},
        {"lines": [b""] * (words.PRINTED_LINES_MAX + 1)},
    ],
)
def test_invalid_output_message_raises_value_error(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        msgspec.structs.replace(OutputLines(2, 1, [b"line"]), **bad)


def test_longest_line_fits_into_one_message() -> None:
    longest = Config(output_line_bytes_max=words.LINE_BYTES_MAX)
    with pytest.raises(ConfigError):
        Config(output_line_bytes_max=words.LINE_BYTES_MAX + 1)
    lines = LineSplitter(HOST_ID, longest.output_line_bytes_max)
    lines.feed(b"x" * words.LINE_BYTES_MAX)
    ((_, found),) = lines.feed(b"\n" * 65536)
    assert len(encode(OutputLines(2, 1, found))) > words.LINE_BYTES_MAX  # type: ignore[arg-type]


def test_late_writable_event_does_not_close_the_socket() -> None:
    """The loop says that there is room when somebody else has used it: nothing has broken; when
    the driver has hung up, something has."""
    near, driver = socket.socketpair()
    with near, driver:
        out = DriverSocket(near, EpollLoop())
        taken: list[int] = []
        out.put(b"one", 3, taken.append)
        out.ready()
        assert not out.broken
        out.put(b"two", 3, taken.append)
        assert driver.recv(10) == b"onetwo"
        driver.close()
        out.ready()
        assert out.broken
        out.put(b"three", 5, taken.append)
        assert taken == [3, 3, 5]
