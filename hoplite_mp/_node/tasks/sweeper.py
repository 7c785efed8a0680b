"""Cleans up shared memory after a dead process: its tasks, holds, and blocks.

A killed process leaves claims on tasks, holds on objects, half-written blocks, and leases behind.
The order of the cleanup is essential: the node first acquires holds on the objects that living
processes still need, then settles the dead process's claims, clears its holder bits, and frees its
blocks. Every step is idempotent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hoplite_mp import _serialize, errors
from hoplite_mp._common.machine_limits import UNLIMITED, available_bytes, format_bytes, total_bytes
from hoplite_mp._common.object_states import (
    FLAG_REFS,
    KIND_STREAM,
    KIND_TASK,
    NODE_SLOT,
    STATE,
    STORED,
    UNCLAIMED,
)
from hoplite_mp._node.io.processes import signal_name
from hoplite_mp._protocol.local import LINE_LOST
from hoplite_mp.errors import HopliteTimeoutError, ObjectLostError

if TYPE_CHECKING:
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.tasks.worker_pools import WorkerInfo

__all__ = ["Sweeper", "how_it_ended", "is_ending"]


class SweeperEvents(Protocol):
    """Reports and requests from this component to the components above it."""

    def freed(self, oid: int) -> None:
        """Called when the object has no holder left on this host."""

    def is_inbound(self, oid: int) -> bool:
        """Whether a task in the node's tables is an inbound task or a reconstruction. Results of
        all other tasks there are not needed, because their submitters are dead."""

    def delay(self, oid: int) -> None:
        """Starts the delay before a task's next attempt."""

    def lost_actor_call(self, worker: WorkerInfo, how: str) -> Exception | None:
        """The error for a call that was running when the actor's process exited, or None if the
        worker is not an actor."""


class Sweeper:
    """Cleans up after the clients on this host."""

    def __init__(self, results: ResultWriter, events: SweeperEvents) -> None:
        self.results = results
        self.events = events
        self.client = results.client
        self.tasks = results.tasks
        # object of a dead process -> holds on the refs inside it
        self.inner: dict[int, list[Any]] = {}
        self.own_tables: set[int] = set(self.client.tables)
        # Numbers of requeued tasks, and of tasks that failed because their worker died.
        self.retried = self.failed = 0

    def sweep(
        self, slot: int, worker: WorkerInfo | None, code: int, reads_on: bool = False
    ) -> list[int]:
        """Cleans up after the client in the slot. Returns the requeued tasks. reads_on: the client
        has left, but its process still reads pinned and leased blocks. A second sweep frees
        them."""
        again: list[int] = []
        concerned = self.client.concerned(slot)
        for header in concerned:
            self._keep_inner(header, slot)
        for header in concerned:
            if self._settle(header, slot, worker, code):
                again.append(header["id"])
        self.client.sweep(slot, not reads_on)
        if not reads_on:
            self.results.store.orphan(slot)
        self.collect()
        return again

    def _keep_inner(self, header: dict[str, Any], slot: int) -> None:
        """Acquires holds on the refs inside an object that remains in use, before the dead client's
        holder bits are cleared."""
        oid = header["id"]
        if not header["flags"] & FLAG_REFS or STATE[header["state"]] not in STORED:
            return
        adopted = header["owner"] == slot
        if adopted and oid not in self.inner:
            self.inner[oid] = self._inner_refs(oid)
            self.tasks.set_taken(oid)
        elif not adopted and header["claimant"] == slot and not header["taken"]:
            self.results.untaken.setdefault(oid, self._inner_refs(oid))

    def _inner_refs(self, oid: int) -> list[Any]:
        got = self.client.view(oid)
        if isinstance(got, int):
            data = self.results.store.spilled_bytes(oid) if got == STATE["SPILLED"] else None
            if data is None:
                return []
            got = data
        mem = memoryview(got)
        headers = [oid for ref in _serialize.read_refs(mem) for oid in self.results.headers(ref)]
        return [self.client.hold(oid) for oid in headers]

    def _settle(
        self, header: dict[str, Any], slot: int, worker: WorkerInfo | None, code: int
    ) -> bool:
        """Settles one header of the dead client. Returns whether its task is queued again."""
        oid, state = header["id"], header["state"]
        orphan = header["owner"] == slot
        claimed = header["claimant"] == slot
        if state == "ABORTED" and claimed:
            self.client.settle(oid, slot)
        elif state == "CLAIMED" and claimed:
            return self._settle_claim(header, slot, worker, code)
        elif STATE[state] in UNCLAIMED and orphan:
            if self.client.take_over(oid, slot):
                name = self.client.task_name(oid)
                self.results.store_error(
                    oid, ObjectLostError(f"the process that submitted {name}() has died")
                )
        elif claimed and STATE[state] in _DONE:
            self.client.announce(oid)
        return False

    def _settle_claim(
        self, header: dict[str, Any], slot: int, worker: WorkerInfo | None, code: int
    ) -> bool:
        oid = header["id"]
        timed_out = worker is not None and worker.verdict == "timeout" and worker.verdict_oid == oid
        task = header["kind"] == KIND_TASK
        if task and not timed_out and header["owner"] != slot and self.requeue(header, slot):
            return True
        if self.client.state(oid) == STATE["ABORTED"]:  # the task has just been cancelled
            self.client.settle(oid, slot)
            return False
        if not self.client.take_over(oid, slot):
            return False
        name = self.client.task_name(oid)
        tries = self.client.add_try(oid)
        runs = task or header["kind"] == KIND_STREAM  # a generator that was computing its next item
        self.failed += runs
        error: Exception
        if not runs:
            error = ObjectLostError("the process that was writing this object has died")
        elif timed_out:
            limit = self.tasks.task(oid)[4] / 1e9
            error = HopliteTimeoutError(
                f"{name}() ran longer than its timeout of {limit:g} s on worker "
                f"{slot}@h{self.tasks.node_number}, which was therefore killed; allow more "
                "with options(timeout=)"
            )
        elif worker is not None and (
            lost := self.events.lost_actor_call(worker, how_it_ended(code, worker))
        ):
            error = lost
        else:
            how = how_it_ended(code, worker)
            error = errors.WorkerLostError(
                f"worker {slot}@h{self.tasks.node_number} {how} "
                f"while running {name}(); tried {tries} time{'s' if tries != 1 else ''}."
            )
        self.results.store_error(oid, error)
        return False

    def requeue(self, header: dict[str, Any], slot: int) -> bool:
        """Queues the process's claimed task again if a retry is left. A task in the node's tables
        must be an inbound task or a reconstruction, because the submitters of all other tasks there
        are dead."""
        oid, wanted = header["id"], header["owner"] != NODE_SLOT
        if not (wanted or self.events.is_inbound(oid)) or not header["retries_left"]:
            return False
        granted = self.client.requeue(oid, slot)
        self.retried += granted
        if granted and self.client.state(oid) == STATE["WAITING"]:
            self.events.delay(oid)
        return granted

    # -- tables of dead processes --------------------------------------------------------------

    def collect(self) -> None:
        """Frees objects without holders in the tables of dead processes, and the refs inside
        them."""
        for oid in self.client.collect():
            self.inner.pop(oid, None)
            self.events.freed(oid)
        self.client.release_tables(self.own_tables)
        self.tasks.watch_only(self.client.tables)

    def completed(self, oids: list[int]) -> None:
        """Acquires holds on the refs in the results of these ended tasks, whose submitters are
        dead."""
        for oid in oids:
            stored = self.client.state(oid) in STORED
            if stored and oid not in self.inner and self.client.flags(oid)[0]:
                self.inner[oid] = self._inner_refs(oid)
                self.tasks.set_taken(oid)


_DONE = (*STORED, STATE["CANCELLED"], STATE["DELETED"])


def how_it_ended(code: int, worker: WorkerInfo | None = None) -> str:
    """Describes how a process exited. After a signal the description includes the memory in use,
    because the kernel kills processes when memory runs out."""
    if code == LINE_LOST or (worker is not None and worker.verdict == "line"):
        return (
            "lost its connection to the node, perhaps because user code has closed file "
            "descriptors that it does not own (os.closerange?)"
        )
    if code < 0:
        return f"was killed by {signal_name(-code)} ({_memory_in_use()})"
    return f"ended with exit code {code}"


def is_ending(pid: int) -> bool:
    """Whether a process has exited, even if its parent has not reaped it yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except ProcessLookupError:
        return True
    except OSError as error:  # FileNotFoundError: the process is gone; other errors: unknown
        return isinstance(error, FileNotFoundError)


def _memory_in_use() -> str:
    """The host's memory usage, as text."""
    total, available = total_bytes(), available_bytes()
    if total >= UNLIMITED or available >= UNLIMITED:
        return "memory in use: unknown"
    used = max(0, total - available)
    doubt = "out of memory? " if used > 0.9 * total else ""
    return f"{doubt}{format_bytes(used)} of {format_bytes(total)} in use"
