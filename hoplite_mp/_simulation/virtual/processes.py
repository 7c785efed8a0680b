"""Processes of simulated hosts. They run shipped client code, one process at a time.

Drivers, workers and members of Groups run shipped code, which blocks. Each process has a thread,
and only the thread that holds the baton runs. The timeline passes the baton to a process, which
returns it when it waits for a futex, for its node, or for some time. So a run is deterministic,
although its code blocks at arbitrary points.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from hoplite_mp import _engine, _shm, _tasks, errors
from hoplite_mp._client.collector import Collector
from hoplite_mp._common import locks
from hoplite_mp._protocol.local import GroupBlockWritten, Reply, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from hoplite_mp._client.submitter import Submitter
    from hoplite_mp._protocol.local import AnyRequest
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.timeline import Timeline

__all__ = [
    "Ended",
    "VirtualChannel",
    "VirtualCollector",
    "VirtualLock",
    "VirtualProcess",
    "VirtualProcesses",
    "virtual_locks",
]


# The longest time to wake a process.
WAKE_S = 30e-6
# Timeout, in real time, of a process that does not return the baton.
HUNG_S = 60.0
FIRST_PID = 1 << 24  # above the pids that the system uses
FOREIGN_SLEEP_S = 0.001  # duration of a sleep of threads that do not belong to the run
_real_sleep = time.sleep


class Ended(BaseException):
    """Raised in the threads of processes when the run has ended."""


class VirtualProcess:
    """A simulated process. `alive`: it has neither ended nor been killed. `failure`: the error of
    `body`."""

    def __init__(
        self,
        all_: VirtualProcesses,
        host: int,
        name: str,
        body: Callable[[], object],
        turned: Callable[[], None],
    ) -> None:
        """turned: called whenever the process has returned the baton."""
        self.host = host
        self.name = name
        self.alive = True
        self.failure: BaseException | None = None
        self.code = 0  # its exit code
        self.pid = FIRST_PID + len(all_.all)
        self.ended: Callable[[], None] = lambda: None  # called when the body has returned
        self.interrupted: Callable[[], None] = lambda: None  # its handler of SIGUSR1
        self._signalled = False
        self.main = self  # the process of which this is a thread
        self._threads: list[VirtualProcess] = []
        self._all = all_
        self._body = body
        self._turned = turned
        self._baton = _thread.allocate_lock()
        self._baton.acquire()
        self._wait_name: Hashable = None
        self._waits = 0  # number of waits, which identifies the wait of a timer
        self._woken = False
        self._resuming = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._over = False

    # -- called on its own thread ----------------------------------------------------------------

    def _run(self) -> None:
        self._baton.acquire()
        try:
            if not self._all.over:
                self._body()
        except Ended:
            pass
        except BaseException as error:
            self.failure = error
        self._over = True
        self._all.return_baton()

    def wait(self, name: Hashable, seconds: float | None) -> bool:
        """Waits until the name is woken, or for the given time. Returns False after a timeout."""
        if self._all.over:
            raise Ended
        self._waits += 1
        self._wait_name = name
        self._woken = False
        if name is not None:
            self._all.waiting.setdefault(name, []).append(self)
        if seconds is not None:
            self._all.timeline.after(seconds, self._timed_out, self._waits)
        self._all.return_baton()
        self._baton.acquire()
        if self._all.over:
            raise Ended
        if self._signalled:
            self._signalled = False
            self.interrupted()
        return self._woken

    # -- called on the thread of the timeline, or of another process ------------------------------

    def interrupt(self) -> None:
        """Sends a signal. The process handles it at its next wait, or now if it is waiting."""
        self._signalled = True
        self._leave()
        self.wake()

    def add_thread(self, thread: VirtualProcess) -> None:
        """Adds a thread, which dies with this process."""
        thread.main, thread.pid = self, self.pid
        self._threads.append(thread)

    def start(self) -> None:
        """Starts the process."""
        self._started = True
        self._thread.start()
        self._resume_soon()

    def _timed_out(self, wait: int) -> None:
        if wait == self._waits:
            self._leave()
            self._resume_soon()

    def _leave(self) -> None:
        sleepers = self._all.waiting.get(self._wait_name)
        if sleepers is not None and self in sleepers:
            sleepers.remove(self)
            if not sleepers:
                del self._all.waiting[self._wait_name]

    def wake(self) -> None:
        """Wakes the process, after its removal from the waiting list."""
        self._woken = True
        self._waits += 1  # invalidates its timer
        self._resume_soon()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            timeline = self._all.timeline
            timeline.after(WAKE_S * timeline.rng.random(), self._resume)

    def _resume(self) -> None:
        if not self.alive:
            self._resuming = False
            return
        network = self._all.network
        if self.host in network.stopped:
            network.deliver(self.host, self.host, self._resume)
            return
        self._resuming = False
        self._all.hand_over(self)
        if self._over:
            self.kill()
            self.ended()
        self._turned()

    def kill(self) -> None:
        """Never runs the process again. Nothing is cleaned up, as after SIGKILL."""
        self.alive = False
        self._leave()
        for thread in self._threads:
            thread.kill()

    # -- the end of a run ----------------------------------------------------------------------

    def finish(self) -> None:
        """Ends its thread."""
        if self._started and not self._over:
            self._all.hand_over(self)


class VirtualProcesses:
    """All processes of a run. `over`: the run has ended."""

    def __init__(self, timeline: Timeline, network: VirtualNetwork) -> None:
        self.timeline = timeline
        self.network = network
        self.all: list[VirtualProcess] = []
        self.running: VirtualProcess | None = None
        self.waiting: dict[Hashable, list[VirtualProcess]] = {}
        self.over = False
        self._main = 0  # ident of the timeline's thread
        self._returned = _thread.allocate_lock()
        self._returned.acquire()
        self._bases: list[int] = []  # addresses of mappings, sorted
        self._mapped: dict[int, int] = {}  # address -> id of the host that owns the memory
        self._clients: list[_shm.Client] = []

    # -- the baton -----------------------------------------------------------------------------

    def hand_over(self, process: VirtualProcess) -> None:
        """Runs the process until it waits or has ended."""
        self.running = process
        process._baton.release()
        if not self._returned.acquire(timeout=HUNG_S):
            raise RuntimeError(f"{process.name} has neither waited nor ended for {HUNG_S:g} s")
        self.running = None

    def return_baton(self) -> None:
        """Called on the thread of the running process."""
        self._returned.release()

    def begin(
        self, host: int, name: str, body: Callable[[], object], turned: Callable[[], None]
    ) -> VirtualProcess:
        """Starts a process."""
        process = VirtualProcess(self, host, name, body, turned)
        self.all.append(process)
        process.start()
        return process

    # -- futexes ---------------------------------------------------------------------------------

    def map(self, client: _shm.Client, host: Hashable) -> None:
        """Registers the memory of the host that this client has mapped."""
        self._clients.append(client)
        address = client.control_address
        if address not in self._mapped:
            self._bases.insert(bisect_right(self._bases, address), address)
        self._mapped[address] = host  # type: ignore[assignment]

    def word(self, address: int) -> Hashable:
        """Returns the identity of a word in shared memory, which is the same for all processes of
        its host."""
        base = self._bases[bisect_right(self._bases, address) - 1]
        return self._mapped[base], address - base

    def sleep(self, address: int, ns: int) -> None:
        """Replaces futex_wait."""
        running = self.running
        if running is not None and self.is_ours():
            running.wait(self.word(address), ns / 1e9)
        else:  # a thread that does not belong to the run; nodes never wait for futexes
            _real_sleep(FOREIGN_SLEEP_S)

    def wake(self, address: int) -> None:
        """Replaces futex_wake."""
        if self.is_ours():
            self.wake_all(self.word(address))

    def wake_all(self, name: Hashable) -> None:
        """Wakes all processes that wait for this name."""
        for process in self.waiting.pop(name, ()):
            process.wake()

    def is_ours(self) -> bool:
        """Returns whether the calling thread is that of the timeline or of the running process."""
        caller = threading.get_ident()
        return caller == self._main or (
            self.running is not None and caller == self.running._thread.ident
        )

    def install(self) -> None:
        """Makes the compiled modules wait and wake through this object."""
        self._main = threading.get_ident()
        for module in (_shm, _tasks):
            module.play(self.sleep, self.wake)
        _engine.play_coll(self.sleep, self.wake)

    def finish(self) -> None:
        """Ends all threads after the run. First all clients are closed. Otherwise the thread of a
        killed process would release resources in shared memory that its node has reassigned."""
        self.over = True
        for client in self._clients:
            client.close()
        for process in self.all:
            process.finish()
        for module in (_shm, _tasks):
            module.play(None, None)
        _engine.play_coll(None, None)


# Locks that the threads of a simulated process share.
#
# A thread that waits for a lock must return the baton, or the owner could never release the lock.
# So in a run whose processes have several threads, `locks` creates these locks for client code.


# Modules whose locks are used by both threads of a simulated process.
CLIENT = (
    "hoplite_mp._client.", "hoplite_mp._sync.", "hoplite_mp._worker.",
    "hoplite_mp._group.member_lifecycle", "hoplite_mp._group.messages",
    "hoplite_mp._api.cluster", "hoplite_mp._api.pools",
)  # fmt: skip


class VirtualLock:
    """A lock, reentrant or not. Threads that do not belong to the run must not use it."""

    def __init__(self, processes: VirtualProcesses, reentrant: bool) -> None:
        self._processes = processes
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        running, owner = self._processes.running, self._caller
        while self._depth and not (self._reentrant and self._is_owned()):
            if self._is_abandoned():
                break
            if not blocking:
                return False
            assert running is not None, "a finalizer waits for a lock"
            if not running.wait(self, None if timeout < 0 else timeout) and timeout >= 0:
                return False
        self._owner = owner
        self._depth += 1
        return True

    def _is_abandoned(self) -> bool:
        """Whether the owner was killed. Then only finalizers of that process's objects use the
        lock; in a dead process they would not run."""
        return self._processes.over or not getattr(self._owner, "alive", True)

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._processes.wake_all(self)

    def locked(self) -> bool:
        return self._depth > 0

    def _is_owned(self) -> bool:  # called by threading.Condition
        return self._depth > 0 and self._owner is self._caller

    @property
    def _caller(self) -> object:
        """The owner of the lock, if the caller acquires it."""
        running = self._processes.running
        return running if running is not None else self._processes

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Locks:
    """Replaces the module `locks`, and creates VirtualLocks."""

    def __init__(self, processes: VirtualProcesses) -> None:
        self._processes = processes

    def lock(self, name: str) -> VirtualLock:
        return VirtualLock(self._processes, False)

    def rlock(self, name: str) -> VirtualLock:
        return VirtualLock(self._processes, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(locks, name)


@contextlib.contextmanager
def virtual_locks(processes: VirtualProcesses) -> Iterator[None]:
    """Replaces the locks of client code for one run in which processes have collectors."""
    ours = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith(CLIENT) and getattr(module, "locks", None) is locks
    ]
    for module in ours:
        module.locks = _Locks(processes)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in ours:
            module.locks = locks  # type: ignore[attr-defined]


# Collector threads of simulated processes.
#
# In production, a process has a second thread, which processes completions while no caller waits
# for them (_client/collector.py). Without it, a program that waits for something else never detects
# that a call has ended: dependencies do not advance, and the lock of a dead process is never
# released. In a run, that thread is a separate process with the same pid, which gets the baton like
# any other.


class VirtualCollector(Collector):
    """The collector of one simulated process."""

    def __init__(
        self,
        submitter: Submitter,
        processes: VirtualProcesses,
        begin: Callable[..., VirtualProcess],
    ) -> None:
        """begin: starts a process on the same host."""
        super().__init__(submitter)
        self._processes = processes
        self._begin = begin
        self._main = processes.running
        self._process: VirtualProcess | None = None

    def start(self) -> None:
        if self._process is None and not self._closed and self._main is not None:
            self._process = self._begin(f"collector of {self._main.name}", self._turns)
            self._main.add_thread(self._process)

    def notice(self) -> None:
        self._woken.put(None)
        self._processes.wake_all(self)

    @property
    def _serves(self) -> bool:
        return self._process is not None and not self._closed

    @property
    def _is_here(self) -> bool:
        return self._process is self._processes.running

    def stop(self) -> None:
        self._closed = True
        if self._process is not None and self._process is not self._processes.running:
            self._process.kill()

    def _sleep(self, seconds: float | None) -> None:
        running = self._processes.running
        if self._woken.empty() and running is not None:
            running.wait(self, seconds)
        while not self._woken.empty():
            self._woken.get()


# A simulated process's connection to the node of its host.
#
# Client code sends requests to its node over a `Channel` (_client/channel.py). Here the timeline
# delivers them. Each message is encoded and decoded, as if it went through a socket.


ROUND_S = 0.0005
_encode = msgspec.msgpack.Encoder().encode
_request = msgspec.msgpack.Decoder(Request).decode
_reply = msgspec.msgpack.Decoder(Reply).decode


class NodeOfHost(Protocol):
    """The host's node."""

    def request(self, slot: int, request: Request) -> None:
        """Receives a request of a process."""


class _OpenLine:
    """Replaces `Watched`: the descriptor of a simulated connection is never closed."""

    def there(self) -> bool:
        return True


class VirtualChannel:
    """Implements the interface of _client/channel.py."""

    def __init__(
        self, node: NodeOfHost, slot: int, processes: VirtualProcesses, first: int = 0
    ) -> None:
        self.node = node
        self.slot = slot
        self.processes = processes
        self.line = _OpenLine()
        self.taken_away: Callable[[], None] = lambda: None
        self.is_closed = False
        self._number = first
        self._seen = [first]
        self._replies: list[Reply] = []
        self._lock = VirtualLock(processes, False)  # one call at a time

    def tell(self, ask: AnyRequest, sent: list[int] | None = None) -> None:
        self._send(Request(0, 0, ask))
        if sent is not None:
            sent.append(1)
        # The time to produce the next piece of a large value.
        if isinstance(ask, GroupBlockWritten):
            running = self.processes.running
            assert running is not None
            running.wait(None, ROUND_S)

    def call(
        self,
        ask: AnyRequest,
        take: Callable[..., Any] | None = None,
        descriptors: Sequence[int] = (),
        sent: list[int] | None = None,
    ) -> Any:
        with self._lock:
            self._number += 1
            number = self._number
            self._send(Request(number, self._seen[0], ask))
            if sent is not None:
                sent.append(1)
            while True:
                while not self._replies:
                    self._check()
                    running = self.processes.running
                    assert running is not None
                    running.wait(self, None)
                reply = self._replies.pop(0)
                if take is not None and reply.number == number and not reply.error:
                    return take(reply.value, number, self._seen)
                self._seen[0] = reply.number
                if reply.number == number:
                    break
        if reply.error and not reply.full:
            raise (errors.NodeLostError if reply.gone else ValueError)(reply.error)
        return reply

    def _send(self, request: Request) -> None:
        self._check()
        self.node.request(self.slot, _request(_encode(request)))

    def _check(self) -> None:
        if self.is_closed:
            raise errors.NodeLostError("the node of this host has ended")

    def deliver(self, reply: Reply) -> None:
        """Receives a reply of the node."""
        self._replies.append(_reply(_encode(reply)))
        self.processes.wake_all(self)

    def close(self) -> None:
        self.is_closed = True
        self.processes.wake_all(self)

    def fileno(self) -> int:
        return -1
