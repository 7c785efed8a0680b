"""Processes of simulated hosts: real client code, of which one runs at a time until it waits.

Why it exists: a driver, a worker, a member of a Group runs the code that ships, which blocks. Each
has a thread of its own, and there is one baton: the timeline hands it to a process, which gives it
back when it sleeps at a futex, waits for its node, or sleeps for some time. So a run is the same
each time, although the code in it blocks where it likes.
It must never know: what a process does.
"""

from __future__ import annotations

import _thread
import threading
import time
from bisect import bisect_right
from typing import TYPE_CHECKING

from hoplite_mp import _shm, _tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from hoplite_mp.simulation.network import Network
    from hoplite_mp.simulation.timeline import Timeline

__all__ = ["Ended", "Process", "Processes"]

# What a process needs to be woken, at most.
WAKE_S = 30e-6
# How long a process may compute, in real time, before the run counts as hung.
HUNG_S = 60.0
FIRST_PID = 1 << 24  # the system's are below
STRANGER_S = 0.001  # how long threads sleep that have nothing to do with the run
_real_sleep = time.sleep


class Ended(BaseException):
    """The run is over: this process is taken off its thread."""


class Process:
    """One of them. `alive`: it has not ended, nor been killed. `failure`: what its body raised."""

    def __init__(
        self,
        all_: Processes,
        host: int,
        name: str,
        body: Callable[[], object],
        turned: Callable[[], None],
    ) -> None:
        """turned: called when it has given the baton back."""
        self.host = host
        self.name = name
        self.alive = True
        self.failure: BaseException | None = None
        self.code = 0  # its exit code
        self.pid = FIRST_PID + len(all_.all)
        self.ended: Callable[[], None] = lambda: None  # called when the body has returned
        self.interrupted: Callable[[], None] = lambda: None  # its handler of SIGUSR1
        self._signalled = False
        self._all = all_
        self._body = body
        self._turned = turned
        self._go = _thread.allocate_lock()
        self._go.acquire()
        self._waits_for: Hashable = None
        self._waits = 0  # one more for each wait, so that a timer knows its own
        self._woken = False
        self._resuming = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._over = False

    # -- on its own thread ---------------------------------------------------------------------

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
        """Until somebody wakes it by that name, or the time is over. False: it is."""
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

    def interrupt(self) -> None:
        """As SIGUSR1 does: seen when it next sleeps, or now if it does."""
        self._signalled = True
        self._leave()
        self.wake()

    # -- on the timeline's ---------------------------------------------------------------------

    def start(self) -> None:
        """It begins as soon as a process can."""
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
        """What it waited for has come; it is not among those who wait any more."""
        self._woken = True
        self._waits += 1  # its timer is for nothing
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
            self.alive = False
            self.ended()
        self._turned()

    def kill(self) -> None:
        """It never runs again: as after SIGKILL, nothing of it is tidied up."""
        self.alive = False
        self._leave()

    # -- the end of a run ----------------------------------------------------------------------

    def finish(self) -> None:
        """Its thread ends."""
        if self._started and not self._over:
            self._all.hand_over(self)


class Processes:
    """All of a run. `over`: the run is."""

    def __init__(self, timeline: Timeline, network: Network) -> None:
        self.timeline = timeline
        self.network = network
        self.all: list[Process] = []
        self.running: Process | None = None
        self.waiting: dict[Hashable, list[Process]] = {}
        self.over = False
        self._main = 0  # the timeline's thread
        self._back = _thread.allocate_lock()
        self._back.acquire()
        self._bases: list[int] = []  # addresses of mappings, in order
        self._mapped: dict[int, int] = {}  # address -> home of the host whose memory it is

    # -- the baton -----------------------------------------------------------------------------

    def hand_over(self, process: Process) -> None:
        """Runs it until it waits, or has ended."""
        self.running = process
        process._go.release()
        if not self._back.acquire(timeout=HUNG_S):
            raise RuntimeError(f"{process.name} has neither waited nor ended for {HUNG_S:g} s")
        self.running = None

    def give_back(self) -> None:
        """Called on the thread of the one that runs."""
        self._back.release()

    def begin(
        self, host: int, name: str, body: Callable[[], object], turned: Callable[[], None]
    ) -> Process:
        """One more; it runs as soon as a process can."""
        process = Process(self, host, name, body, turned)
        self.all.append(process)
        process.start()
        return process

    # -- words in shared memory ----------------------------------------------------------------

    def map(self, client: _shm.Client, host: Hashable) -> None:
        """That client's mapping is of the memory of that host."""
        address = client.control_address
        if address not in self._mapped:
            self._bases.insert(bisect_right(self._bases, address), address)
        self._mapped[address] = host  # type: ignore[assignment]

    def word(self, address: int) -> Hashable:
        """The name of a word: the same for all processes of its host."""
        base = self._bases[bisect_right(self._bases, address) - 1]
        return self._mapped[base], address - base

    def sleep(self, address: int, ns: int) -> None:
        """In the place of waiting at a futex."""
        running = self.running
        if running is not None and self.is_ours():
            running.wait(self.word(address), ns / 1e9)
        else:  # a thread that has nothing to do with the run; nodes never sleep here
            _real_sleep(STRANGER_S)

    def wake(self, address: int) -> None:
        """In the place of waking those who wait there."""
        if self.is_ours():
            self.wake_all(self.word(address))

    def wake_all(self, name: Hashable) -> None:
        """Those who wait for that."""
        for process in self.waiting.pop(name, ()):
            process.wake()

    def is_ours(self) -> bool:
        """Is the caller's thread the timeline's, or that of the process that runs?"""
        caller = threading.get_ident()
        return caller == self._main or (
            self.running is not None and caller == self.running._thread.ident
        )

    def play(self) -> None:
        """From now on the compiled modules sleep and wake by this."""
        self._main = threading.get_ident()
        for module in (_shm, _tasks):
            module.play(self.sleep, self.wake)

    def finish(self) -> None:
        """The run is over: all threads end."""
        self.over = True
        for process in self.all:
            process.finish()
        for module in (_shm, _tasks):
            module.play(None, None)
