"""Processes of simulated hosts. They run real client code, one process at a time.

Drivers, workers and members of Groups run the code that ships, which blocks. Each process has a
thread, and only the thread that has the baton runs. The timeline hands the baton to a process,
which gives it back when it sleeps at a futex, waits for its node, or sleeps for some time. So a run
is deterministic, although the code in it blocks wherever it likes.
"""

from __future__ import annotations

import _thread
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from hoplite_mp import _engine, _shm, _tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.timeline import Timeline

__all__ = ["Ended", "VirtualProcess", "VirtualProcesses"]

# The longest time that waking a process takes.
WAKE_S = 30e-6
# How long, in real time, a process may compute before the run counts as hung.
HUNG_S = 60.0
FIRST_PID = 1 << 24  # above the pids that the system uses
STRANGER_S = 0.001  # how long threads sleep that do not belong to the run
_real_sleep = time.sleep


class Ended(BaseException):
    """The run is over: unwinds a process's thread."""


class VirtualProcess:
    """A simulated process. `alive`: it has neither ended nor been killed. `failure`: what `body`
    raised."""

    def __init__(
        self,
        all_: VirtualProcesses,
        host: int,
        name: str,
        body: Callable[[], object],
        turned: Callable[[], None],
    ) -> None:
        """turned: called after each time that it has given the baton back."""
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
        self._go = _thread.allocate_lock()
        self._go.acquire()
        self._waits_for: Hashable = None
        self._waits = 0  # counts waits, so that a timer recognises its own
        self._woken = False
        self._resuming = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._over = False

    # -- called on its own thread ----------------------------------------------------------------

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._all.over:
                self._body()
        except Ended:
            pass
        except BaseException as error:
            self.failure = error
        self._over = True
        self._all.give_back()

    def wait(self, whatever: Hashable, seconds: float | None) -> bool:
        """Waits until woken by that name, or for so many seconds. Returns False after a timeout."""
        if self._all.over:
            raise Ended
        self._waits += 1
        self._waits_for = whatever
        self._woken = False
        if whatever is not None:
            self._all.waiting.setdefault(whatever, []).append(self)
        if seconds is not None:
            self._all.timeline.after(seconds, self._time_over, self._waits)
        self._all.give_back()
        self._go.acquire()
        if self._all.over:
            raise Ended
        if self._signalled:
            self._signalled = False
            self.interrupted()
        return self._woken

    # -- called on the thread of the timeline, or of another process ------------------------------

    def interrupt(self) -> None:
        """Sends a signal. The process handles it at its next sleep, or now if it sleeps."""
        self._signalled = True
        self._leave()
        self.wake()

    def has_thread(self, thread: VirtualProcess) -> None:
        """That one is a thread of this process, and dies with it."""
        thread.main, thread.pid = self, self.pid
        self._threads.append(thread)

    def start(self) -> None:
        """Starts the process."""
        self._started = True
        self._thread.start()
        self._resume_soon()

    def _time_over(self, wait: int) -> None:
        if wait == self._waits:
            self._leave()
            self._resume_soon()

    def _leave(self) -> None:
        sleepers = self._all.waiting.get(self._waits_for)
        if sleepers is not None and self in sleepers:
            sleepers.remove(self)
            if not sleepers:
                del self._all.waiting[self._waits_for]

    def wake(self) -> None:
        """Wakes the process, which has been removed from the waiting list."""
        self._woken = True
        self._waits += 1  # invalidates its timer
        self._resume_soon()

    def _resume_soon(self) -> None:
        if not self._resuming:
            self._resuming = True
            timeline = self._all.timeline
            timeline.after(WAKE_S * timeline.chance.random(), self._resume)

    def _resume(self) -> None:
        if not self.alive:
            self._resuming = False
            return
        network = self._all.network
        if self.host in network.stopped:
            network.pass_on(self.host, self.host, self._resume)
            return
        self._resuming = False
        self._all.hand_over(self)
        if self._over:
            self.kill()
            self.ended()
        self._turned()

    def kill(self) -> None:
        """Never runs it again, so that nothing of it is tidied up, as after SIGKILL."""
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
    """All processes of a run. `over`: the run is over."""

    def __init__(self, timeline: Timeline, network: VirtualNetwork) -> None:
        self.timeline = timeline
        self.network = network
        self.all: list[VirtualProcess] = []
        self.running: VirtualProcess | None = None
        self.waiting: dict[Hashable, list[VirtualProcess]] = {}
        self.over = False
        self._main = 0  # ident of the timeline's thread
        self._back = _thread.allocate_lock()
        self._back.acquire()
        self._bases: list[int] = []  # addresses of mappings, sorted
        self._mapped: dict[int, int] = {}  # address -> id of the host whose memory it is
        self._clients: list[_shm.Client] = []

    # -- the baton -----------------------------------------------------------------------------

    def hand_over(self, process: VirtualProcess) -> None:
        """Runs the process until it waits or has ended."""
        self.running = process
        process._go.release()
        if not self._back.acquire(timeout=HUNG_S):
            raise RuntimeError(f"{process.name} has neither waited nor ended for {HUNG_S:g} s")
        self.running = None

    def give_back(self) -> None:
        """Called on the thread of the process that runs."""
        self._back.release()

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
        """Registers that this client has mapped the memory of that host."""
        self._clients.append(client)
        address = client.control_address
        if address not in self._mapped:
            self._bases.insert(bisect_right(self._bases, address), address)
        self._mapped[address] = host  # type: ignore[assignment]

    def word(self, address: int) -> Hashable:
        """The identity of a word in shared memory, the same for all processes of its host."""
        base = self._bases[bisect_right(self._bases, address) - 1]
        return self._mapped[base], address - base

    def sleep(self, address: int, ns: int) -> None:
        """Replaces futex_wait."""
        running = self.running
        if running is not None and self.is_ours():
            running.wait(self.word(address), ns / 1e9)
        else:  # a thread that does not belong to the run; nodes never sleep here
            _real_sleep(STRANGER_S)

    def wake(self, address: int) -> None:
        """Replaces futex_wake."""
        if self.is_ours():
            self.wake_all(self.word(address))

    def wake_all(self, name: Hashable) -> None:
        """Wakes all processes that wait by that name."""
        for process in self.waiting.pop(name, ()):
            process.wake()

    def is_ours(self) -> bool:
        """Is the caller's thread the timeline's, or that of the process that runs?"""
        caller = threading.get_ident()
        return caller == self._main or (
            self.running is not None and caller == self.running._thread.ident
        )

    def play(self) -> None:
        """From now on the compiled modules sleep and wake through this object."""
        self._main = threading.get_ident()
        for module in (_shm, _tasks):
            module.play(self.sleep, self.wake)
        _engine.play_small(self.sleep, self.wake)

    def finish(self) -> None:
        """The run is over: ends all threads. First all clients are closed, because otherwise the
        thread of a killed process would release in shared memory what its node has given to others
        since."""
        self.over = True
        for client in self._clients:
            client.close()
        for process in self.all:
            process.finish()
        for module in (_shm, _tasks):
            module.play(None, None)
        _engine.play_small(None, None)
