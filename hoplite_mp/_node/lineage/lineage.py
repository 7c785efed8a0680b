"""Lineage of the results of this host's tasks: the objects needed to reconstruct a lost result.

A result that is only on another host is lost together with that host. Its task is then run again,
as in Ray. While the result has a holder, the task's record names the function and the arguments,
but does not keep them alive. A lineage entry does: it holds the function, arguments passed by
value, and arguments that are results. If only lineage holds a result and the result can itself be
reconstructed, its bytes are dropped and only its header is kept. The result is then absent (see
_node/objects/remote_objects.py). A chain of steps therefore costs about one KiB per step. Objects
from `put` and objects of other owners are not held, so they are freed with their last ref as usual.

An entry is created when the result is on another host, or when a worker on this host leases a block
for a large result. At that time the task is still claimed, so its submitter still holds all objects
in the entry. The entry is dropped when the result is gone or memory for lineage is short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common import ids
from hoplite_mp._common.object_states import FLAG_REFS, KIND_TASK, NODE_SLOT, STATE, VALUELESS
from hoplite_mp._node.objects.remote_objects import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._planner.resources import Demand

__all__ = ["Lineage", "LineageEntry"]

# Interval between checks for unneeded objects. Higher: the memory of intermediate results is freed
# later. Lower: more checks (a few us for each entry).
POLL_S = 0.25
# Even with many entries, checks take at most about 1/20 of the node's time.
POLL_SHARE = 20
# Minimum interval between checks when the store is full.
FULL_POLL_S = 0.05
# The cost of an entry, excluding its held objects: header, record, and memory of this process.
ENTRY_BYTES = 1024
# Results up to this size keep their bytes, because dropping them would save little.
SMALL_BYTES_MAX = 4096


@dataclass(slots=True)
class LineageEntry:
    """The data for the reconstruction of one result."""

    oid: int
    held: tuple[int, ...]
    spent: int = 0  # number of retries used since the first run
    demand: Demand = ()  # resources of the task
    closed: bool = False  # the task's pool is forgotten, and its number may be reused


@dataclass(slots=True)
class _Held:
    """One object that entries hold."""

    hold: Any
    nbytes: int  # bytes that count against the limit; 0: the object's bytes may be dropped
    count: int = 0


class Lineage:
    """The lineage entries of this host."""

    def __init__(
        self,
        results: ResultWriter,
        remote_objects: RemoteObjects,
        bytes_max: int,
        loop: LoopPort,
        demand_of: Callable[[int], Demand],
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.remote_objects = remote_objects
        self.bytes_max = bytes_max
        self.loop = loop
        self.entries: dict[int, LineageEntry] = {}  # by result, oldest first
        self.held: dict[int, _Held] = {}
        self.nbytes = 0
        self.demand_of = demand_of
        self._sweeping = False  # a timer for the next check is running
        self._swept_at = 0.0
        self._let_go = False  # an entry was dropped since the last check

    # -- keeping -------------------------------------------------------------------------------

    def keep(self, oid: int) -> None:
        """Creates an entry for an unfinished task whose result may be lost later."""
        if oid in self.entries or not self.bytes_max:
            return
        header = self.client.inspect(oid)
        if header["id"] != oid or header["kind"] != KIND_TASK or not header["retries_left"]:
            return
        held: dict[int, None] = {}
        function, args_oid, *_ = self.tasks.task(oid)
        for part in (function, args_oid):
            if part and self._hold(part, True):
                held[part] = None
        for object_id in self.arguments(oid):
            host_id, argument = ids.unpack_id(object_id)
            if host_id == self.client.host_id and argument not in held and self._wanted(argument):
                small = argument not in self.entries
                if self._hold(argument, small):
                    held[argument] = None
        self.entries[oid] = LineageEntry(oid, tuple(held), demand=self.demand_of(oid))
        self.nbytes += ENTRY_BYTES
        while self.nbytes > self.bytes_max:
            self._forget(next(iter(self.entries)))
        self._sweep_later(POLL_S)

    def _wanted(self, argument: int) -> bool:
        """Whether to hold an argument. It must be a small result or a result that can be
        reconstructed."""
        if argument in self.entries:
            return True
        header = self.client.inspect(argument)
        return bool(header["kind"] == KIND_TASK and header["size"] <= SMALL_BYTES_MAX)

    def _hold(self, oid: int, counts: bool) -> bool:
        held = self.held.get(oid)
        if held is None:
            hold = self.client.hold(oid)
            if hold is None:
                return False
            nbytes = self.client.inspect(oid)["size"] if counts else 0
            held = self.held[oid] = _Held(hold, nbytes)
            self.nbytes += nbytes
        held.count += 1
        return True

    def close_pool(self, number: int) -> None:
        """Records that the tasks of a forgotten pool cannot be run again."""
        for oid, entry in self.entries.items():
            if self.tasks.pool_of(oid) == number:
                entry.closed = True

    def retries(self, oid: int) -> int:
        """The number of further runs that the task may have; 0 if it has no entry."""
        entry = self.entries.get(oid)
        return (
            0
            if entry is None or entry.closed
            else self.client.inspect(oid)["retries_left"] - entry.spent
        )

    def arguments(self, oid: int, read: bool = False) -> list[bytes]:
        """The ids of the refs among a task's arguments, from its record. read: only refs whose
        values the task is known to need (see `_serialize.read_dependencies`)."""
        _, args_oid, args, *_ = self.tasks.task(oid)
        got: Any = self.client.view(args_oid) if args_oid else args
        if isinstance(got, int):
            got = self.results.store.spilled_bytes(args_oid)
        if not got:
            return []
        mem = memoryview(got)
        return _serialize.read_dependencies(mem) if read else _serialize.read_refs(mem)

    # -- dropping ------------------------------------------------------------------------------

    def _forget(self, oid: int) -> None:
        """Drops an entry, and the entries of results that only this entry held."""
        self._let_go = True
        ahead = [oid]
        while ahead:
            entry = self.entries.pop(ahead.pop(), None)
            if entry is None:
                continue
            self.nbytes -= ENTRY_BYTES
            # Other entries held this result only because it could be reconstructed.
            dropped = self.held.pop(entry.oid, None)
            if dropped is not None:
                self.nbytes -= dropped.nbytes
                del dropped
            for part in entry.held:
                held = self.held.get(part)
                if held is None:
                    continue
                held.count -= 1
                if not held.count:
                    del self.held[part]
                    self.nbytes -= held.nbytes
                    del held
                    if self._is_over(part):
                        ahead.append(part)

    def _is_over(self, oid: int) -> bool:
        return self.client.state(oid) in VALUELESS

    def holds(self, oid: int) -> int:
        """The number of holds that lineage has on the object."""
        return 1 if oid in self.held else 0

    def _sweep_later(self, seconds: float) -> None:
        if not self._sweeping and (self.entries or self._let_go):
            self._sweeping = True
            self.loop.call_later(seconds, self._sweep_again)

    def _sweep_again(self) -> None:
        self._sweeping = False
        duration = self.sweep()
        self._sweep_later(max(POLL_S, POLL_SHARE * duration))

    def drop_unneeded(self) -> None:
        """Drops unneeded objects immediately. Called when the store is full, and before its use is
        measured."""
        if self.entries and self.loop.now() - self._swept_at >= FULL_POLL_S:
            self.sweep()

    def sweep(self) -> float:
        """Drops entries of results that are gone, and bytes that only lineage holds. Returns the
        duration in seconds."""
        begun = self.loop.now()
        # Objects that the previous check dropped have been collected in the meantime, so spans of
        # dead clients may now be empty.
        if self._let_go:
            self._let_go = False
            self.results.store.sweep_spans()
        for oid in list(self.entries):
            if oid in self.entries and self._is_over(oid):
                self._forget(oid)
        for oid in list(self.held):
            if oid in self.entries and self._only_ours(oid) and self.retries(oid):
                self._let_bytes_go(oid)
        self._swept_at = self.loop.now()
        return self._swept_at - begun

    def _only_ours(self, oid: int) -> bool:
        """Whether lineage has the only remaining hold on the object."""
        if self.client.private_counts(oid) != (1, 0):
            return False
        header = self.client.inspect(oid)
        wanted = bool(header["pins"] or header["flags"] & FLAG_REFS)
        return not wanted and header["refs"] == [NODE_SLOT]

    def _let_bytes_go(self, oid: int) -> None:
        """Drops the bytes of a result that can be reconstructed. The result becomes absent."""
        state, size = self.client.state(oid), self.client.inspect(oid)["size"]
        remote = self.remote_objects.by_oid.get(oid)
        if remote is not None:
            if remote.holders and not remote.payload and not remote.waiting:
                self.remote_objects.lost(oid, _UNWANTED)
            return
        if size <= SMALL_BYTES_MAX or state not in (STATE["SEALED"], STATE["SPILLED"]):
            return
        layout = layout_of(self.results, self.remote_objects, oid)
        store = self.results.store
        if state == STATE["SPILLED"] and not store.forget_spilled(oid):
            return
        if state == STATE["SEALED"]:
            if not self.client.spill_begin(oid):
                return
            self.client.spill_end(oid, 0)
        object_id = ids.pack_id(self.client.host_id, oid)
        self.remote_objects.add(oid, object_id, size, (), layout)
        self.remote_objects.by_oid[oid].why = f"object {object_id.hex()} is lost: {_UNWANTED}"


_UNWANTED = "it had no ref left"
