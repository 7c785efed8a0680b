"""Closes a cluster in one process: keeps unread results readable, and fails all pending objects.

As in the standard library, a finished Future may be read after its cluster has been closed. Results
in memory are pinned. Spilled results are not restored into the store, which may be full of pinned
results. Instead, this process reads them through the node, piece by piece, into private memory. The
copies have a deadline and a size limit, so leaving `with` always completes. Reading a result that
was not kept raises an error with the reason.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from hoplite_mp import errors
from hoplite_mp._common import clock
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.object_states import AWAY, STATE
from hoplite_mp._protocol.local import SPILLED_PIECE_BYTES, ReadSpilled
from hoplite_mp.errors import ClosedError, HopliteError, ManagerLostError

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._client.ports import Submitting
    from hoplite_mp._client.queues import Settles

__all__ = ["Completion", "Unread", "call_back", "fail_pending", "keep_results", "suppress_closed"]


ALIGN = 64  # alignment of buffers in a payload, and of private memory that holds a payload
UNREAD_MIN = 1024  # minimum length of the list at which read Futures are removed from it


class Unread(deque["weakref.ref[Settles]"]):
    """The finished Futures of one process that may be unread. Any thread may append a Future at any
    time, so the list is never rebuilt: each operation on a deque is atomic. A thread that makes the
    list longer than `limit` calls `sort_out`."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = UNREAD_MIN

    def sort_out(self) -> None:
        """Removes Futures that no longer exist, or whose result has been read."""
        with contextlib.suppress(IndexError):  # another thread removes Futures, too
            for _ in range(len(self)):
                one = self.popleft()
                future = one()
                if future is not None and future._is_unread:
                    self.append(one)
        self.limit = max(UNREAD_MIN, 2 * len(self))

    def futures(self) -> list[Settles]:
        """All Futures in the list that still exist."""
        return [future for one in deque(self) if (future := one()) is not None]


def keep_results(memory: Memory, futures: Iterable[Settles], bytes_max: int) -> None:
    """Pins or copies the unread results of these finished Futures. Copies at most `bytes_max`
    bytes, within `Config.shutdown_timeout_s`."""
    away = [future for future in futures if future._is_unread and not _pin(memory, future)]
    deadline = clock.monotonic() + memory.config.shutdown_timeout_s
    left = bytes_max
    for future in away:
        why = "there was no time left"
        if clock.monotonic() < deadline:
            size = int(memory.client.inspect(future._oid)["size"])
            why = f"at most {format_bytes(bytes_max)} of such results are kept"
            if size <= left:
                why = "the node no longer replied"
                if _copy(memory, future, size, deadline):
                    left -= size
                    continue
        future._unkept = (
            "its result had been moved to disk and was not read before the cluster closed "
            f"({why}): call result() or c.get() inside the with block, or raise memory="
        )


def _pin(memory: Memory, future: Settles) -> bool:
    """Pins the result. Returns False if its bytes are not in memory on this host."""
    if future.cancelled():
        return True
    got = memory.client.view(future._oid)
    if not isinstance(got, int):
        future._kept = memoryview(got)
    return got not in AWAY if isinstance(got, int) else True


def _copy(memory: Memory, future: Settles, size: int, deadline: float) -> bool:
    """Copies the result from the spill file. Returns False if the copy fails."""
    oid = future._oid
    while clock.monotonic() < deadline:
        try:
            data = _pieces(memory, oid, size, deadline)
        except (HopliteError, ValueError):  # the node has stopped, or its disk failed
            return False
        # The bytes are valid only if the object remained spilled: once it has been restored, its
        # place in the file may be reused for another object.
        if data is not None and memory.client.state(oid) == STATE["SPILLED"]:
            future._kept = data
            return True
        if _pin(memory, future):  # in the meantime, it was restored for another process
            return True
        if data is None and memory.client.state(oid) == STATE["SPILLED"]:
            return False  # it is on another host
    return False


def _pieces(memory: Memory, oid: int, size: int, deadline: float) -> memoryview | None:
    """A copy of the payload in private memory; None if the payload is not in the spill file, or if
    reading took too long."""
    room = np.empty(size + ALIGN, np.uint8)
    start = -room.__array_interface__["data"][0] % ALIGN
    data = memoryview(room.data)[start : start + size]
    for offset in range(0, size, SPILLED_PIECE_BYTES):
        length = min(SPILLED_PIECE_BYTES, size - offset)
        piece = memory.channel.call(ReadSpilled(oid, offset, length)).value
        if piece is None or len(piece) != length or clock.monotonic() >= deadline:
            return None
        data[offset : offset + length] = piece
    return data.toreadonly()


# Fails all pending objects of a process when its node is gone or its cluster was closed.
#
# A task that is being submitted at that moment must fail, too. The end is therefore a state,
# `Memory.lost`, which is set once, before the first task is failed. A thread that adds a pending
# task checks `Memory.lost` afterwards and, if it is set, fails all pending objects once more. So
# one of the two threads fails this task's Future.


_log = logging.getLogger("hoplite_mp")


class suppress_closed:
    """Suppresses the errors for a lost node or a closed cluster. Names NodeLostError only if an
    exception was raised, because the first use of the name creates the class, which most programs
    never need."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: object) -> bool:
        if kind is None:
            return False
        return issubclass(kind, (errors.NodeLostError, ManagerLostError, ClosedError))


def fail_pending(submitter: Submitting, error: BaseException) -> None:
    """Fails all objects that are not done with the error in `Memory.lost`, or with `error` if
    `lost` is not set. A finished task keeps its result, unless its completion cannot be processed.
    Afterwards the caller must call `call_back` without holding a lock."""
    memory, tasks, pending = submitter.memory, submitter.tasks, submitter.pending
    if memory.lost is None:
        memory.lost = error
    for finished_too in (False, True):
        for oid, one in pending.copy().items():
            if not finished_too and memory.client.usable and tasks.done(oid):
                continue
            future = one.future
            if future is not None and future._settle(False, True, memory.lost_again()):
                submitter.ended_futures.append(future)
            # The entry is removed last, so that it is found again if Ctrl-C interrupts this loop.
            pending.pop(oid, None)
            one.holds, one.needs = None, []
        if not finished_too and pending:
            submitter.look_at_all()
    submitter.forget_waiting()


def call_back(submitter: Submitting) -> None:
    """Calls the callbacks of all finished Futures. All Futures are settled before the first
    callback runs, because a callback may wait for another Future."""
    interrupt: BaseException | None = None
    while submitter.ended_futures:
        try:
            future = submitter.ended_futures.popleft()
        except IndexError:  # another thread has taken the last one
            break
        try:
            future._tell()
        except BaseException as problem:  # for example SystemExit; the other callbacks must run
            _log.exception("in a callback of a Future whose cluster has ended")
            interrupt = problem
    if isinstance(interrupt, KeyboardInterrupt):
        raise interrupt


class Completion:
    """The shutdown of a cluster. One thread performs it, and other threads can wait for its end. In
    the performing thread, `wait` returns immediately, because callbacks may call it there."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def over(self) -> None:
        """Called when the shutdown is complete or has failed."""
        self._over.set()

    def wait(self) -> None:
        if threading.get_ident() != self._thread:
            self._over.wait()
