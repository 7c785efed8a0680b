"""How results of this host's tasks came to be: what must be held to make them again.

Why it exists: a result that only another host held dies with that host. The task's record names
its function and its arguments as long as somebody holds the result; this file sees to it that they
are still there. So an entry holds the function, arguments that travelled by value, and results that
were arguments. It does not hold their bytes: of a result that nobody else wants, and that can be
made again itself, only the name stays (it is absent, see node/objects/remote_objects.py), so a
chain of steps costs a few hundred bytes a step. What was put, and what other hosts own, is not held
at all: it goes with its last ref, as always.

An entry is made while the task is claimed, when its submitter still holds everything: as soon as
its bytes turn out to be elsewhere, or a worker of this host leases a block for a big result. It
goes with the result.
It must never know: who asks for lost objects, how a task is run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hoplite_mp import ids, serial
from hoplite_mp.headers import FLAG_REFS, KIND_TASK, NODE_SLOT, STATE, VALUELESS
from hoplite_mp.node.objects.layouts import layout_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.objects.remote_objects import RemoteObjects
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Loop
    from hoplite_mp.planner.resources import Demand

__all__ = ["Entry", "Lineage"]

# How often it is looked what nobody wants any more. Higher: memory of intermediate results is free
# later; lower: more looks (a few us for each result that is kept track of).
LOOK_S = 0.25
# Of the node's time, as one of so many parts: what looking may take when there are many entries.
LOOK_SHARE = 20
# When the store is full it is looked at once, but not more often than this.
FULL_LOOK_S = 0.05
# What an entry costs besides the objects that it holds: header, record, and words in this process.
ENTRY_BYTES = 1024
# A result of that size or less is held as it is: to forget it would save little.
SMALL_BYTES_MAX = 4096


@dataclass(slots=True)
class Entry:
    """What one result is made from."""

    oid: int
    held: tuple[int, ...]
    spent: int = 0  # of the retries that were left when the task was done
    demand: Demand = ()  # resources that it needs


@dataclass(slots=True)
class _Held:
    """One object that entries hold."""

    hold: Any
    nbytes: int  # that count against the limit; 0: its bytes may go
    count: int = 0


class Lineage:
    """All entries of this host."""

    def __init__(
        self,
        results: Results,
        remote_objects: RemoteObjects,
        bytes_max: int,
        loop: Loop,
        demand_of: Callable[[int], Demand],
    ) -> None:
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.remote_objects = remote_objects
        self.bytes_max = bytes_max
        self.loop = loop
        self.entries: dict[int, Entry] = {}  # by result, the oldest first
        self.held: dict[int, _Held] = {}
        self.nbytes = 0
        self.demand_of = demand_of
        self._looking = False
        self._looked = 0.0
        self._let_go = False  # something, since the last look

    # -- what is kept --------------------------------------------------------------------------

    def keep(self, oid: int) -> None:
        """A task that is not done yet, and whose result may be lost one day."""
        if oid in self.entries or not self.bytes_max:
            return
        header = self.client.inspect(oid)
        if header["kind"] != KIND_TASK or not header["retries_left"]:
            return
        held: dict[int, None] = {}
        function, args_oid, *_ = self.tasks.task(oid)
        for part in (function, args_oid):
            if part and self._hold(part, True):
                held[part] = None
        for object_id in self.arguments(oid):
            home, argument = ids.unpack_id(object_id)
            if home == self.client.home and argument not in held and self._wanted(argument):
                small = argument not in self.entries
                if self._hold(argument, small):
                    held[argument] = None
        self.entries[oid] = Entry(oid, tuple(held), demand=self.demand_of(oid))
        self.nbytes += ENTRY_BYTES
        while self.nbytes > self.bytes_max:
            self._forget(next(iter(self.entries)))
        self._look_later(LOOK_S)

    def _wanted(self, argument: int) -> bool:
        """Results of tasks: those that can be made again, and small ones."""
        if argument in self.entries:
            return True
        header = self.client.inspect(argument)
        return bool(header["kind"] == KIND_TASK and header["size"] <= SMALL_BYTES_MAX)

    def _hold(self, oid: int, counts: bool) -> bool:
        one = self.held.get(oid)
        if one is None:
            hold = self.client.hold(oid)
            if hold is None:
                return False
            nbytes = self.client.inspect(oid)["size"] if counts else 0
            one = self.held[oid] = _Held(hold, nbytes)
            self.nbytes += nbytes
        one.count += 1
        return True

    def retries(self, oid: int) -> int:
        """How often the task may still be run again; 0 also if nothing is known of it."""
        entry = self.entries.get(oid)
        return 0 if entry is None else self.client.inspect(oid)["retries_left"] - entry.spent

    def arguments(self, oid: int, read: bool = False) -> list[bytes]:
        """Ids of the refs among a task's arguments, as its record has them. `read`: of those whose
        values it needs, as far as that is told apart (see serial.read_dependencies)."""
        _, args_oid, args, *_ = self.tasks.task(oid)
        got: Any = self.client.view(args_oid) if args_oid else args
        if isinstance(got, int):
            got = self.results.store.spilled_bytes(args_oid)
        if not got:
            return []
        mem = memoryview(got)
        return serial.read_dependencies(mem) if read else serial.read_refs(mem)

    # -- what goes -----------------------------------------------------------------------------

    def _forget(self, oid: int) -> None:
        """Its entry goes, and those of all that only it has held."""
        self._let_go = True
        ahead = [oid]
        while ahead:
            entry = self.entries.pop(ahead.pop(), None)
            if entry is None:
                continue
            self.nbytes -= ENTRY_BYTES
            # Others hold it as a result that can be made again, which it is not from now on.
            dropped = self.held.pop(entry.oid, None)
            if dropped is not None:
                self.nbytes -= dropped.nbytes
                del dropped
            for part in entry.held:
                one = self.held.get(part)
                if one is None:
                    continue
                one.count -= 1
                if not one.count:
                    del self.held[part]
                    self.nbytes -= one.nbytes
                    del one
                    if self._is_over(part):
                        ahead.append(part)

    def _is_over(self, oid: int) -> bool:
        return self.client.state(oid) in VALUELESS

    def holds(self, oid: int) -> int:
        """How many holds of this file are on it."""
        return 1 if oid in self.held else 0

    def _look_later(self, seconds: float) -> None:
        if not self._looking and (self.entries or self._let_go):
            self._looking = True
            self.loop.call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._looking = False
        took = self.look()
        self._look_later(max(LOOK_S, LOOK_SHARE * took))

    def make_room(self) -> None:
        """The store is full: what nobody wants goes now."""
        if self.entries and self.loop.now() - self._looked >= FULL_LOOK_S:
            self.look()

    def look(self) -> float:
        """Entries of results that are gone go, and bytes that nobody else wants. Returns how long
        that took."""
        begun = self.loop.now()
        if self._let_go:  # and it has been collected meanwhile: spans of the dead may be empty
            self._let_go = False
            self.results.store.sweep_spans()
        for oid in list(self.entries):
            if oid in self.entries and self._is_over(oid):
                self._forget(oid)
        for oid in list(self.held):
            if oid in self.entries and self._only_ours(oid) and self.retries(oid):
                self._let_bytes_go(oid)
        self._looked = self.loop.now()
        return self._looked - begun

    def _only_ours(self, oid: int) -> bool:
        """Is this file's the last hold on it?"""
        if self.client.private_counts(oid) != (1, 0):
            return False
        header = self.client.inspect(oid)
        wanted = bool(header["pins"] or header["flags"] & FLAG_REFS)
        return not wanted and header["refs"] == [NODE_SLOT]

    def _let_bytes_go(self, oid: int) -> None:
        """Of a result that can be made again only the name stays."""
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
        object_id = ids.pack_id(self.client.home, oid)
        self.remote_objects.add(oid, object_id, size, (), layout)
        self.remote_objects.by_oid[oid].why = f"object {object_id.hex()} is lost: {_UNWANTED}"


_UNWANTED = "nobody held a ref to it any more"
