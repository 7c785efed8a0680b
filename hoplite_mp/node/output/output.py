"""Workers' stdout and stderr, line by line, on their way to the drivers that they are for.

Why it exists: what a task prints belongs in front of its user. Each worker writes to pipes; whole
lines go to the audience of the task that has printed them, in order. A pipe whose next lines must
wait is left alone until they can go, so that nothing grows and the loop never waits; its worker
waits in `print`, if it prints much.
It must never know: what the lines mean, how they travel to other hosts.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hoplite_mp.node.output.lines import Lines, Run
from hoplite_mp.node.output.subscriber import Subscriber
from hoplite_mp.node.shell.driver_socket import DriverSocket, frames
from hoplite_mp.protocol.output import LINES_MARK, bytes_of, same_host

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from hoplite_mp.config import Config
    from hoplite_mp.node.ports import Loop

__all__ = ["Output"]

# Lines of this host's own workers that wait for its driver. Higher: workers wait less for a driver
# that reads in bursts. Lower: less memory in the node.
BACKLOG_BYTES_MAX = 1 << 20
READ_BYTES = 65536
# Of a pipe at once when everything in it is wanted: what the largest pipe holds. Somebody else may
# still write into it.
DRAIN_BYTES_MAX = 1 << 20


@dataclass(slots=True, eq=False)
class Pipe:
    """One stream of one worker. `waiting`: lines that cannot go yet, for the first of which the
    pipe is held."""

    fd: int  # -1: the worker is dead, and everything has been read
    slot: int
    stream: int
    lines: Lines
    ended: Callable[[int], None]  # told the number of the descriptor that has ended
    waiting: deque[Run] = field(default_factory=deque)


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def far_subscriber(self, home: int) -> Subscriber | None:
        """Drivers of other hosts; None: nobody is there."""


class Output:
    """Pipes in; out to this host's driver, and to others."""

    def __init__(
        self,
        sock: socket.socket,
        config: Config,
        home: int,
        number: Callable[[], int],
        loop: Loop,
        patience_s: float | None,
        above: Above,
    ) -> None:
        """number: of this node, for the labels. patience_s: how long a driver may take no lines
        before what is for it is dropped; None: for ever."""
        self.loop = loop
        self.home = home
        self.number = number
        self.patience_s = patience_s
        self.line_bytes_max = config.output_line_bytes_max
        self.above = above
        # Drivers of this host by name; 0: the one that has started it.
        self.drivers: dict[int, tuple[Subscriber, DriverSocket]] = {}
        self.pipes: dict[int, Pipe] = {}  # fd -> what is read from it
        self.held: list[Pipe] = []
        self._watched: set[Subscriber] = set()
        self.attach(0, sock)

    def add(
        self, fd: int, stream: int, slot: int, audience: int, ended: Callable[[int], None]
    ) -> None:
        """Reads a worker's pipe from now on; audience: of what it says before its first mark.
        ended: told when the pipe has been closed here because nobody can write into it any more."""
        os.set_blocking(fd, False)
        lines = Lines(self.home, self.line_bytes_max, audience)
        self.pipes[fd] = pipe = Pipe(fd, slot, stream, lines, ended)
        self._listen(pipe)

    def _listen(self, pipe: Pipe) -> None:
        self.loop.watch(pipe.fd, lambda: self._ready(pipe))

    # -- in ------------------------------------------------------------------------------------

    def _ready(self, pipe: Pipe) -> None:
        """Takes what is there, or learns that the pipe has ended."""
        if pipe.waiting:
            return  # held since this event was reported
        fd = pipe.fd
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            pipe.waiting.extend(pipe.lines.feed(data))
            self._push(pipe)
        else:
            self._close(pipe)
            pipe.ended(fd)

    def catch_up(self, fd: int) -> None:
        """What has been written into that pipe so far is on its way, as far as there is room."""
        pipe = self.pipes.get(fd)
        if pipe is not None and not pipe.waiting:
            self._empty(pipe)
            self._push(pipe)

    def mark_lines(self, number: int, audience: int) -> None:
        """Behind what is there for that driver of this host, as far as there was room for it."""
        for fd in list(self.pipes):
            self.catch_up(fd)
        if audience in self.drivers:
            _, driver = self.drivers[audience]
            driver.put(frames(LINES_MARK, str(number), [b""]), 0, lambda nbytes: None)

    def drain(self, fd: int) -> None:
        """The worker is dead: everything that it wrote, and then the end."""
        pipe = self.pipes[fd]
        self._empty(pipe)
        self._close(pipe)

    def _empty(self, pipe: Pipe) -> None:
        """Everything that is in it now."""
        for _ in range(DRAIN_BYTES_MAX // READ_BYTES):
            try:
                data = os.read(pipe.fd, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                return
            pipe.waiting.extend(pipe.lines.feed(data))

    def _close(self, pipe: Pipe) -> None:
        pipe.waiting.extend(pipe.lines.finish())
        del self.pipes[pipe.fd]
        self.loop.unwatch(pipe.fd)
        os.close(pipe.fd)
        pipe.fd = -1
        self._push(pipe)

    def last_lines(self, audience: int) -> None:
        """Everything for that one, also lines without an end: its tasks are done."""
        for pipe in list(self.pipes.values()):
            if not pipe.waiting:  # else more of it may be in the pipe
                self._empty(pipe)
                if pipe.lines.audience == audience:
                    pipe.waiting.extend(pipe.lines.finish())
                self._push(pipe)

    # -- out -----------------------------------------------------------------------------------

    def _push(self, pipe: Pipe) -> None:
        """Hands lines over until one must wait; then the pipe is held."""
        while pipe.waiting:
            # Taken out first: what is sent may tell that there is room, or nobody any more.
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

    def _subscriber(self, home: int) -> Subscriber | None:
        if home in self.drivers:
            return self.drivers[home][0]
        if same_host(home, self.home):
            return None  # one that has left
        return self.above.far_subscriber(home)

    def _hold(self, pipe: Pipe) -> None:
        if pipe not in self.held:
            self.held.append(pipe)
            if pipe.fd >= 0:
                self.loop.unwatch(pipe.fd)  # a paused one would still report its end

    def _let_go(self, pipe: Pipe) -> None:
        if pipe in self.held:
            self.held.remove(pipe)
            if pipe.fd >= 0:
                self._listen(pipe)

    def push_held(self) -> None:
        """There may be room again."""
        for pipe in list(self.held):
            self._push(pipe)

    def waits_for(self, home: int) -> bool:
        """Whether there may be lines for that audience that cannot go yet."""
        return any(pipe.fd >= 0 or any(to == home for to, _ in pipe.waiting) for pipe in self.held)

    def to_driver(
        self,
        slot: int,
        number: int,
        stream: int,
        lines: list[bytes],
        taken: Callable[[int], None],
        audience: int,
    ) -> None:
        """Lines of a worker of that node, for the driver of this host with that name."""
        if audience in self.drivers:
            _, driver = self.drivers[audience]
            label = f"worker {slot}@h{number}"
            driver.put(frames(stream, label, lines), bytes_of(lines), taken)
        else:  # it has left: what is for it goes nowhere
            taken(bytes_of(lines))

    # -- drivers that come and go --------------------------------------------------------------

    def attach(self, name: int, sock: socket.socket) -> None:
        """One more driver of this host."""
        driver = DriverSocket(sock, self.loop)

        def deliver(slot: int, stream: int, lines: list[bytes]) -> None:
            self.to_driver(slot, self.number(), stream, lines, taken, name)

        def taken(nbytes: int) -> None:
            self.taken(listener, nbytes)

        listener = Subscriber(deliver, BACKLOG_BYTES_MAX, self.patience_s)
        self.drivers[name] = listener, driver

    def has_all(self, name: int) -> bool:
        """Has that attached driver, which leaves, all that was written for it on this host?"""
        listener, driver = self.drivers[name]
        if not driver.broken:
            self.last_lines(name)
            listener.confess()
        return driver.broken or not (driver.backlog or self.waits_for(name))

    def detach(self, name: int, busy: Callable[[int], bool]) -> None:
        """It is gone, and has what was still under way to it when its socket is closed. `busy`: as
        in `lose`."""
        _, driver = self.drivers.pop(name)
        self.lose(name, busy)
        driver.end()

    # -- who listens ---------------------------------------------------------------------------

    def taken(self, subscriber: Subscriber, nbytes: int) -> None:
        """That driver has taken so much."""
        if subscriber.taken(nbytes, self.loop.now()):
            self.push_held()

    def _watch(self, subscriber: Subscriber) -> None:
        due = subscriber.due()
        if due is not None and subscriber not in self._watched:
            self._watched.add(subscriber)
            self.loop.call_later(max(0.0, due - self.loop.now()), lambda: self._look(subscriber))

    def _look(self, subscriber: Subscriber) -> None:
        self._watched.discard(subscriber)
        if subscriber.give_up(self.loop.now()):
            self.push_held()
        else:
            self._watch(subscriber)

    def lose(self, home: int, busy: Callable[[int], bool]) -> None:
        """That driver is gone, and what is for it goes nowhere. Workers that are not `busy` speak
        to this host's own one."""
        self.push_held()
        for pipe in list(self.pipes.values()):
            if pipe.lines.audience == home and not pipe.waiting and not busy(pipe.slot):
                self._empty(pipe)
                if pipe.lines.audience == home:
                    pipe.waiting.extend(pipe.lines.finish())
                    pipe.lines.audience = 0
                self._push(pipe)

    # -- the end -------------------------------------------------------------------------------

    def drain_all(self) -> None:
        """The host ends: everything that the workers wrote."""
        for fd in list(self.pipes):
            self.drain(fd)

    @property
    def quiet(self) -> bool:
        """Everything has gone."""
        drivers = (driver for _, driver in self.drivers.values())
        return not self.held and all(one.broken or not one.backlog for one in drivers)
