"""Logs failed tasks whose errors the program has not read, when the cluster is closed. Failures of
nested tasks are logged when the worker of the submitting task exits.

Without the report, a program that drops a Future, or never requests its result, would not notice
the failure. A failure counts as read after `result`, `exception`, `await` or `get`, or after the
Future was used as an argument. A Future that still exists when the cluster is closed can be read
later, so its failure is reported when the program exits.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import weakref
from typing import TYPE_CHECKING, TypeAlias

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import NODE_SLOT, STATE

if TYPE_CHECKING:
    from hoplite_mp import _shm, _tasks
    from hoplite_mp._client.queues import Pending, Settles

__all__ = ["Failures"]

TRACEBACKS_MAX = 3  # maximum number of tracebacks in the report
# Maximum number of failures whose payloads are kept. With a higher value, the report can include
# tracebacks even if there were many earlier failures. Each payload costs up to 80 KiB.
PAYLOADS_MAX = 64
FAILURES_MAX = 100_000  # beyond it, the report begins with "more than"; each uses about 200 bytes
NAMES_MAX = 10  # maximum number of task names in the report
# Maximum number of closed clusters whose failures are kept. Beyond this number, the earliest
# cluster's failures are reported immediately. A higher value costs memory in a program that opens
# many clusters and keeps failed Futures.
CLUSTERS_MAX = 16

_log = logging.getLogger("hoplite_mp")


# The task's name, its error payload (empty if it was not kept), and its Future.
Failure: TypeAlias = "tuple[str, bytes, weakref.ref[Settles]]"


class Failures:
    """The unread failures of one process's tasks. Any thread may call any method."""

    def __init__(
        self, client: _shm.Client, tasks: _tasks.Tasks, pending: dict[int, Pending]
    ) -> None:
        self._client = client
        self._tasks = tasks
        self._pending = pending
        self._found: dict[int, Failure] = {}  # task id -> failure
        self._payloads = 0
        self._more = False
        self.closed = False  # whether the cluster is closed, so that failures are ignored

    def note(self, future: Settles) -> None:
        """Records that the task of this Future has failed."""
        if self.closed or _was_read(future):
            return
        if len(self._found) >= FAILURES_MAX:
            self._more = True
            return
        oid, payload = future._oid, b""
        if self._client.closing and self._tasks.claimant(oid) == NODE_SLOT:
            return  # for example, its worker was killed when the cluster was closed
        if self._payloads < PAYLOADS_MAX and self._client.state(oid) == STATE["FAILED"]:
            got = self._client.view(oid)
            if not isinstance(got, int):
                payload = _serialize.short_error(memoryview(got))
                self._payloads += 1
        self._found[oid] = self._tasks.name(oid), payload, weakref.ref(future)
        if _was_read(future):  # another thread has just read it
            self._forget(oid)

    def _forget(self, oid: int) -> None:
        found = self._found.pop(oid, None)
        if found is not None and found[1]:
            self._payloads -= 1

    def read(self, oid: int) -> None:
        """Removes a failure whose task's result has been read, or is about to be read."""
        self._forget(oid)
        pending = self._pending.get(oid)
        if pending is not None and pending.future is not None:
            pending.future._reports = False
        self._forget(oid)  # `note` may have run between the two steps

    def report(self) -> None:
        """Called when the cluster is closed. Logs failures that can no longer be read. All others
        are logged when the program exits."""
        self.closed = True
        gone = {oid: one for oid, one in list(self._found.items()) if one[2]() is None}
        for oid in gone:
            self._forget(oid)
        _log_failures(list(gone.values()), self._more)
        _later[:] = [found for found in (*_later, self._found) if found]  # without empty ones
        while len(_later) > CLUSTERS_MAX:
            _log_failures(list(_later.pop(0).values()), False)

    def report_all(self) -> None:
        """Called when a worker exits. Logs all failures, because no Future can be read
        afterwards."""
        for pending in self._pending.copy().values():  # some may be done, but not yet processed
            future = pending.future
            if future is not None and self._client.state(pending.oid) == STATE["FAILED"]:
                self.note(future)
        self.closed = True
        found, self._found = self._found, {}
        _log_failures(list(found.values()), self._more)


def _was_read(future: Settles) -> bool:
    return not future._reports


_later: list[dict[int, Failure]] = []  # the failures of clusters that are closed


def _log_failures(found: list[Failure], more: bool) -> None:
    if not found:
        return
    count = f"more than {len(found)}" if more else str(len(found))
    tasks, errors = ("tasks", "errors") if len(found) > 1 else ("task", "error")
    lines = [f"{count} {tasks} failed, and the program has not read the {errors}:"]
    counts: dict[str, int] = {}
    shown = 0
    for name, payload, _ in found:
        if shown < TRACEBACKS_MAX and (text := _text(payload)):
            lines.append(f"{name}() {text}")
            shown += 1
        else:
            counts[name] = counts.get(name, 0) + 1
    others = [f"{name}() ({count})" for name, count in counts.items()]
    if others:
        dots = ", ..." if len(others) > NAMES_MAX else ""
        lines.append(f"others: {', '.join(others[:NAMES_MAX])}{dots}")
    _log.warning("%s", "\n".join(lines))


def _text(payload: bytes) -> str:
    with contextlib.suppress(Exception):  # for example, the bytes are not a pickled error
        return _serialize.error_text(memoryview(payload)) if payload else ""
    return ""


@atexit.register
def _report_rest() -> None:
    """Runs after the exit handler that closes open clusters, because it is registered before that
    handler."""
    for found in _later:
        _log_failures(list(found.values()), False)


os.register_at_fork(after_in_child=_later.clear)
