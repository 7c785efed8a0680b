"""Forwards workers' stdout and stderr to their drivers, line by line.

Each worker writes to pipes. Complete lines are sent, in order, to the output owner (the driver) of
the task that printed them. While the next lines of a pipe must wait, the pipe is not read, so that
memory stays bounded and the loop never blocks. A worker that prints a lot then blocks in `print`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hoplite_mp._node.io import processes
from hoplite_mp._node.io.driver_socket import DriverSocket, frames
from hoplite_mp._protocol.output import LINES_MARK, MARK_BYTES, bytes_of, mark_head, same_host

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.io.driver_socket import Socket
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp.config import Config

__all__ = ["LineSplitter", "Output", "Run", "Subscriber"]

# Subscribers: each one counts its driver's unread bytes, and records the driver's progress.
#
# A slow driver must not lose lines, but a driver that reads nothing must not block workers that
# also serve other drivers. Lines therefore wait while the driver makes progress, however slow.
# After `patience_s` without progress they are dropped and counted until the driver reads again. The
# driver then receives the number of dropped lines.


class Subscriber:
    """A driver on this or another host, which receives lines. Times are in seconds on the loop's
    clock."""

    def __init__(
        self,
        deliver: Callable[[int, int, list[bytes]], None],
        bytes_max: int,
        patience_s: float | None,
    ) -> None:
        """deliver: sends (slot, stream, lines) immediately. patience_s: None means no limit."""
        self.deliver = deliver
        self.bytes_max = bytes_max
        self.patience_s = patience_s
        self.waiting = 0  # number of bytes delivered but not yet read
        # time at which the driver last made progress while lines were waiting; None: none wait
        self.stalled_at: float | None = None
        self.stuck = False  # the driver has read nothing for too long, so its lines are dropped
        self.dropped: dict[tuple[int, int], int] = {}  # (slot, stream) -> number of lines

    def offer(self, slot: int, stream: int, lines: list[bytes], now: float) -> bool:
        """Sends the lines to the driver if the limit allows that, or drops them if the driver is
        `stuck`. Returns False if the lines must wait."""
        if self.stuck:
            key = slot, stream
            self.dropped[key] = self.dropped.get(key, 0) + len(lines)
            return True
        if self.waiting >= self.bytes_max:
            if self.stalled_at is None:
                self.stalled_at = now
            return False
        self._deliver(slot, stream, lines)
        return True

    def _deliver(self, slot: int, stream: int, lines: list[bytes]) -> None:
        self.waiting += bytes_of(lines)
        self.deliver(slot, stream, lines)

    def taken(self, nbytes: int, now: float) -> bool:
        """Records that the driver has read this many bytes. Returns whether waiting lines may be
        offered again."""
        self.waiting -= nbytes
        if self.waiting > self.bytes_max // 2:
            if self.stalled_at is not None:
                self.stalled_at = now
            return False
        stalled = self.stalled_at is not None or self.stuck
        self.stalled_at, self.stuck = None, False
        self.report_dropped()
        return stalled

    def report_dropped(self) -> None:
        """Sends the driver the number of dropped lines."""
        dropped, self.dropped = self.dropped, {}
        for (slot, stream), count in dropped.items():
            lines = "1 line was" if count == 1 else f"{count} lines were"
            text = (
                f"{lines} dropped here: no line was read for {self.patience_s:g} s (output_wait_s)"
            )
            self._deliver(slot, stream, [text.encode()])

    def due(self) -> float | None:
        """The time at which the driver times out, or None if no lines are waiting for it."""
        if self.stalled_at is None or self.patience_s is None or self.stuck:
            return None
        return self.stalled_at + self.patience_s

    def give_up(self, now: float) -> bool:
        """Returns whether the driver has timed out. If so, its lines are dropped from then on."""
        due = self.due()
        if due is None or now < due:
            return False
        self.stuck = True
        return True


# Splits the bytes of one pipe into lines, and finds the output owner of each line.
#
# The output owner of a line is the driver that receives it. When a worker starts to print for
# another output owner, it first writes a mark. A pipe is read in pieces of any length. A line may
# exceed the length limit, lack a line end, or be cut off by a mark.


# (output owner, consecutive lines for it).
Run = tuple[int, list[bytes]]


class LineSplitter:
    """The state of one pipe. `output_owner`: the output owner of the next bytes; `served`: all
    output owners in marks so far."""

    def __init__(self, host_id: int, line_bytes_max: int, output_owner: int = 0) -> None:
        self.line_bytes_max = line_bytes_max
        self.output_owner = output_owner
        self.served: set[int] = set()
        self.rest = b""  # the beginning of an incomplete line
        self._head = mark_head(host_id)

    def feed(self, data: bytes) -> list[Run]:
        """Processes bytes from the pipe. Returns the completed lines without line ends. A line that
        is too long is returned in pieces."""
        *lines, rest = (self.rest + data).split(b"\n")
        most = self.line_bytes_max
        runs: list[Run] = []
        if lines:
            if self._head in data or self._head in lines[0]:
                runs = self._by_output_owner(lines)
            else:
                runs = [(self.output_owner, lines)]
            if max(map(len, lines)) > most:
                runs = [(to, self._pieces(found)) for to, found in runs]
        # Keep at least MARK_BYTES, because the rest may end with the first bytes of a mark.
        if len(rest) >= most + MARK_BYTES:
            cut = (len(rest) - MARK_BYTES) // most * most
            pieces = [rest[at : at + most] for at in range(0, cut, most)]
            rest = rest[cut:]
            _append(runs, self.output_owner, pieces)
        self.rest = rest
        return runs

    def finish(self) -> list[Run]:
        """Returns an incomplete last line, if there is one."""
        rest, self.rest = self.rest, b""
        return [(self.output_owner, self._pieces([rest]))] if rest else []

    def _by_output_owner(self, lines: list[bytes]) -> list[Run]:
        runs: list[Run] = []
        for line in lines:
            before, output_owner = self._marked(line)
            if output_owner is None:
                _append(runs, self.output_owner, [line])
                continue
            if before:
                _append(runs, self.output_owner, [before])
            self.output_owner = output_owner
            self.served.add(output_owner)
        return runs

    def _marked(self, line: bytes) -> tuple[bytes, int | None]:
        """Splits a line that ends with a mark into the text before the mark and the mark's output
        owner. Returns the whole line and None if there is no mark."""
        at = len(line) - MARK_BYTES
        if at < 0 or not line.startswith(self._head, at):
            return line, None
        try:
            return line[:at], int(line[at + len(self._head) :], 16)
        except ValueError:  # the program has printed text that resembles a mark
            return line, None

    def _pieces(self, lines: list[bytes]) -> list[bytes]:
        most = self.line_bytes_max
        found: list[bytes] = []
        for line in lines:
            found += [line[at : at + most] for at in range(0, len(line), most)] or [line]
        return found


def _append(runs: list[Run], output_owner: int, lines: list[bytes]) -> None:
    if runs and runs[-1][0] == output_owner:
        runs[-1][1].extend(lines)
    else:
        runs.append((output_owner, lines))


# Queue limit in bytes for lines from this host's workers to one driver on this host. Higher:
# workers wait less for a driver that reads in bursts. Lower: less memory in the node.
BACKLOG_BYTES_MAX = 1 << 20
READ_BYTES = 65536
# The maximum number of bytes read at once from a pipe that must be emptied: the capacity of the
# largest pipe. The limit is necessary because another process may still be writing to the pipe.
DRAIN_BYTES_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class Pipe:
    """One stream of one worker. `waiting`: the lines that cannot be sent yet. The pipe is not read
    until they have been sent or dropped."""

    fd: int  # -1: closed, because the writer is gone and all bytes have been read
    slot: int
    stream: int
    lines: LineSplitter
    ended: Callable[[int], None]  # called with the number of the closed descriptor
    waiting: deque[Run] = field(default_factory=deque)


class OutputEvents(Protocol):
    """Requests from this component to the components above it."""

    def remote_subscriber(self, output_owner: int) -> Subscriber | None:
        """The subscriber for a driver on another host, or None if that host is gone."""


class Output:
    """Reads workers' pipes and sends lines to drivers, here and on other hosts."""

    def __init__(
        self,
        sock: Socket,
        config: Config,
        host_id: int,
        number: Callable[[], int],
        loop: LoopPort,
        patience_s: float | None,
        events: OutputEvents,
    ) -> None:
        """number: returns this node's number, for the labels of lines. patience_s: how long a
        driver may read nothing before its lines are dropped; None: no limit."""
        self.loop = loop
        self.host_id = host_id
        self.number = number
        self.patience_s = patience_s
        self.line_bytes_max = config.output_line_bytes_max
        self.events = events
        # The drivers on this host by name; 0 is the driver that started the host.
        self.drivers: dict[int, tuple[Subscriber, DriverSocket]] = {}
        self.pipes: dict[int, Pipe] = {}  # fd -> its pipe
        self.held: list[Pipe] = []
        self._watched: set[Subscriber] = set()
        self.attach(0, sock)

    def add(
        self, fd: int, stream: int, slot: int, output_owner: int, ended: Callable[[int], None]
    ) -> None:
        """Starts to read a worker's pipe. output_owner: the owner of the lines before the first
        mark. ended: called after the pipe was closed because it has no writer left."""
        processes.open_for_reading(fd)
        lines = LineSplitter(self.host_id, self.line_bytes_max, output_owner)
        self.pipes[fd] = pipe = Pipe(fd, slot, stream, lines, ended)
        self._listen(pipe)

    def _listen(self, pipe: Pipe) -> None:
        self.loop.watch(pipe.fd, lambda: self._ready(pipe))

    # -- in ------------------------------------------------------------------------------------

    def _ready(self, pipe: Pipe) -> None:
        """Reads the available bytes, or detects the pipe's end."""
        if pipe.waiting:
            return  # the pipe was paused after epoll had reported this event
        fd = pipe.fd
        data = processes.read(fd, READ_BYTES)
        if data is None:
            return
        if data:
            pipe.waiting.extend(pipe.lines.feed(data))
            self._push(pipe)
        else:
            self._close(pipe)
            pipe.ended(fd)

    def catch_up(self, fd: int) -> None:
        """Sends the current contents of the pipe, as far as the limit allows."""
        pipe = self.pipes.get(fd)
        if pipe is not None and not pipe.waiting:
            self._empty(pipe)
            self._push(pipe)

    def mark_lines(self, number: int, output_owner: int) -> None:
        """Sends the driver a mark. It follows all lines already printed for the driver, except
        those that must wait because of the limit."""
        self.read_marks()
        if output_owner in self.drivers:
            _, driver = self.drivers[output_owner]
            driver.put(frames(LINES_MARK, str(number), [b""]), 0, lambda nbytes: None)

    def drain(self, fd: int) -> None:
        """Reads all remaining output of a dead worker, and closes the pipe."""
        pipe = self.pipes[fd]
        self._empty(pipe)
        self._close(pipe)

    def _empty(self, pipe: Pipe) -> None:
        """Reads the current contents of the pipe."""
        for _ in range(DRAIN_BYTES_MAX // READ_BYTES):
            data = processes.read(pipe.fd, READ_BYTES)
            if not data:
                return
            pipe.waiting.extend(pipe.lines.feed(data))

    def _close(self, pipe: Pipe) -> None:
        pipe.waiting.extend(pipe.lines.finish())
        del self.pipes[pipe.fd]
        self.loop.unwatch(pipe.fd)
        processes.close(pipe.fd)
        pipe.fd = -1
        self._push(pipe)

    def last_lines(self, output_owner: int) -> None:
        """Sends all lines of the output owner, including incomplete ones, because its tasks are
        done."""
        for pipe in list(self.pipes.values()):
            if not pipe.waiting:  # a paused pipe may contain more such lines
                self._empty(pipe)
                if pipe.lines.output_owner == output_owner:
                    pipe.waiting.extend(pipe.lines.finish())
                self._push(pipe)

    # -- out -----------------------------------------------------------------------------------

    def _push(self, pipe: Pipe) -> None:
        """Offers lines to their subscribers. If some must wait, pauses the pipe."""
        while pipe.waiting:
            # Remove the lines first, because `offer` may call this method again if the driver reads
            # them immediately or is gone.
            to, lines = pipe.waiting.popleft()
            subscriber = self._subscriber(to)
            if subscriber is not None and not subscriber.offer(
                pipe.slot, pipe.stream, lines, self.loop.now()
            ):
                pipe.waiting.appendleft((to, lines))
                self._hold(pipe)
                self._watch(subscriber)
                return
        self._let_go(pipe)

    def _subscriber(self, output_owner: int) -> Subscriber | None:
        if output_owner in self.drivers:
            return self.drivers[output_owner][0]
        if same_host(output_owner, self.host_id):
            return None  # the driver has left
        return self.events.remote_subscriber(output_owner)

    def _hold(self, pipe: Pipe) -> None:
        if pipe not in self.held:
            self.held.append(pipe)
            if pipe.fd >= 0:
                # Unwatch the pipe completely, because epoll always reports that the other end is
                # closed.
                self.loop.unwatch(pipe.fd)

    def _let_go(self, pipe: Pipe) -> None:
        if pipe in self.held:
            self.held.remove(pipe)
            if pipe.fd >= 0:
                self._listen(pipe)

    def push_held(self) -> None:
        """Offers the lines of paused pipes again, because the limit may allow them now."""
        for pipe in list(self.held):
            self._push(pipe)

    def read_marks(self) -> None:
        """Reads all available output, so that `served` is up to date."""
        for fd in list(self.pipes):
            self.catch_up(fd)

    def served(self) -> dict[int, set[int]]:
        """The output owners in each worker's marks, by slot, excluding workers without marks."""
        found: dict[int, set[int]] = {}
        for pipe in self.pipes.values():
            if pipe.lines.served:
                found.setdefault(pipe.slot, set()).update(pipe.lines.served)
        return found

    def waits_for(self, output_owner: int) -> bool:
        """Whether lines for the output owner may be waiting to be sent."""
        return any(
            pipe.fd >= 0 or any(to == output_owner for to, _ in pipe.waiting) for pipe in self.held
        )

    def to_driver(
        self,
        slot: int,
        number: int,
        stream: int,
        lines: list[bytes],
        taken: Callable[[int], None],
        output_owner: int,
    ) -> None:
        """Sends lines to a driver on this host. slot, number: the worker that printed them, and the
        number of its node. output_owner: the driver's name."""
        if output_owner in self.drivers:
            _, driver = self.drivers[output_owner]
            label = f"worker {slot}@h{number}"
            driver.put(frames(stream, label, lines), bytes_of(lines), taken)
        else:  # the driver has left, so its lines are dropped
            taken(bytes_of(lines))

    # -- drivers that attach and leave ----------------------------------------------------------

    def attach(self, name: int, sock: Socket) -> None:
        """Adds a driver on this host."""
        driver = DriverSocket(sock, self.loop)

        def deliver(slot: int, stream: int, lines: list[bytes]) -> None:
            self.to_driver(slot, self.number(), stream, lines, taken, name)

        def taken(nbytes: int) -> None:
            self.taken(listener, nbytes)

        listener = Subscriber(deliver, BACKLOG_BYTES_MAX, self.patience_s)
        self.drivers[name] = listener, driver

    def has_all(self, name: int) -> bool:
        """Sends a leaving driver the last lines of this host's workers. Returns whether all output
        for the driver on this host has been sent."""
        listener, driver = self.drivers[name]
        if not driver.broken:
            self.last_lines(name)
            listener.report_dropped()
        return driver.broken or not (driver.backlog or self.waits_for(name))

    def detach(self, name: int, busy: Callable[[int], bool]) -> None:
        """Removes a driver. Its socket is closed when the queued data has been sent. busy: as in
        `lose`."""
        _, driver = self.drivers.pop(name)
        self.lose(name, busy)
        driver.end()

    # -- subscribers ----------------------------------------------------------------------------

    def taken(self, subscriber: Subscriber, nbytes: int) -> None:
        """Called when a driver has read this many bytes."""
        if subscriber.taken(nbytes, self.loop.now()):
            self.push_held()

    def _watch(self, subscriber: Subscriber) -> None:
        due = subscriber.due()
        if due is not None and subscriber not in self._watched:
            self._watched.add(subscriber)
            self.loop.call_later(
                max(0.0, due - self.loop.now()), lambda: self._maybe_give_up(subscriber)
            )

    def _maybe_give_up(self, subscriber: Subscriber) -> None:
        self._watched.discard(subscriber)
        if subscriber.give_up(self.loop.now()):
            self.push_held()
        else:
            self._watch(subscriber)

    def lose(self, output_owner: int, busy: Callable[[int], bool]) -> None:
        """Drops the lines of a driver that is gone. Further output of workers that are not `busy`
        is sent to the driver that started this host."""
        self.push_held()
        for pipe in list(self.pipes.values()):
            if pipe.lines.output_owner == output_owner and not pipe.waiting and not busy(pipe.slot):
                self._empty(pipe)
                if pipe.lines.output_owner == output_owner:
                    pipe.waiting.extend(pipe.lines.finish())
                    pipe.lines.output_owner = 0
                self._push(pipe)

    # -- the end -------------------------------------------------------------------------------

    def drain_all(self) -> None:
        """Reads all remaining output of the workers when the host shuts down."""
        for fd in list(self.pipes):
            self.drain(fd)

    @property
    def quiet(self) -> bool:
        """Whether all lines have been sent."""
        drivers = (driver for _, driver in self.drivers.values())
        return not self.held and all(driver.broken or not driver.backlog for driver in drivers)
