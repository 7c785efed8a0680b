"""Reconstruction: lost results are recomputed by their tasks when they are requested.

A task's result is absent (_node/objects/remote_objects.py) when it is done but has no known living
holder. When the result is requested, the node itself submits the task again, to the same pool, with
the arguments in the task's record. Absent arguments are reconstructed first. This is lineage
reconstruction as in Ray. The value that this run returns, or the exception that it raises, becomes
the object's value. Each run uses up one of the task's retries. An absent object of another owner is
requested from that owner.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize, _tasks
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.object_states import FLAG_INLINE, KIND_TASK, STATE, TASK_HERE
from hoplite_mp._node.tasks.hints import CLOSED
from hoplite_mp._protocol.peers import OBJECTS_ASKED_MAX, CopiesQuery, CopiesReport, Reconstruct
from hoplite_mp.errors import ObjectLostError, StoreFullError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.lineage.lineage import Lineage
    from hoplite_mp._node.objects.imports import ImportRecord, Imports
    from hoplite_mp._node.objects.ownership_transfer import OwnershipTransfer
    from hoplite_mp._node.objects.remote_objects import RemoteObject, RemoteObjects
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import LoopPort
    from hoplite_mp._node.questions import Questions
    from hoplite_mp._node.roster import Roster
    from hoplite_mp._node.tasks.hints import Hints
    from hoplite_mp._planner.resources import Demand
    from hoplite_mp._protocol.peers import PeerMessage

__all__ = ["Reconstruction", "ReplicaQuery"]

# Replica query: before a reconstructed result is used, all hosts are asked for the original value.
#
# A second run of a task may return a different value, and no reader may see parts of both values.
# The owner of a lost result may not know all hosts with a copy, so it asks all hosts while the task
# is running again. A host that has the whole original value reports that. A host that has a part of
# it, or is about to fetch it, discards the part and asks the owner again. When all hosts have
# answered and none has reported the original value, no part of it is left on any of them. A host
# with which only this node has lost contact may still be alive and have the value, so this node
# waits for the manager's decision.


class ReplicaQuery:
    """This node's questions to other nodes, and its answers to their questions."""

    def __init__(
        self,
        imports: Imports,
        remote_objects: RemoteObjects,
        replicas: Replicas,
        questions: Questions,
        send: Callable[[int, PeerMessage], bool],
        host_ids: Callable[[], Iterable[int]],
        doubtful: Callable[[], bool],
    ) -> None:
        """host_ids: returns the ids of all other living hosts. doubtful: returns whether this node
        has lost contact with a host about which the manager has not decided yet."""
        self.imports = imports
        self.remote_objects = remote_objects
        self.client = imports.client
        self.replicas = replicas
        self.questions = questions
        self.send = send
        self.host_ids = host_ids
        self.doubtful = doubtful
        self._round = 1  # the number of the next round
        self._objects: list[bytes] = []  # the objects in the next round
        self._open: set[int] = set()  # rounds that some hosts have not answered yet

    # -- questions from this node --------------------------------------------------------------

    def about(self, object_id: bytes) -> int:
        """Adds an object to the next round. Returns the number of the round."""
        self._objects.append(object_id)
        number = self._round
        if len(self._objects) == OBJECTS_ASKED_MAX:
            self.flush()
        return number

    def flush(self) -> None:
        """Starts the round, with one message to each host about all added objects."""
        if self._objects:
            objects, self._objects = tuple(self._objects), []
            number, self._round = self._round, self._round + 1
            self._open.add(number)
            self.questions.ask_all(
                self.host_ids(),
                functools.partial(CopiesQuery, objects),
                lambda found: self._open.discard(number),
            )

    def answered(self, number: int) -> bool:
        """Whether each host has answered the round or has died."""
        return number < self._round and number not in self._open and not self.doubtful()

    # -- answers from this node ----------------------------------------------------------------

    def asked(self, host_id: int, message: CopiesQuery) -> None:
        """Answers the owner of these objects, which has no record of any holder."""
        for object_id in message.objects:
            for record in self.imports.all_of(object_id):
                if record.oid in self.remote_objects and not self.remote_objects.absent(record.oid):
                    self.remote_objects.lost(record.oid, "all its holders are gone")
                elif self.imports.is_whole(record):
                    self.replicas.tell(object_id, self.client.inspect(record.oid)["size"])
        self.send(host_id, CopiesReport(message.number))


# The interval and the maximum number of requests to the owner about one object. They are repeated
# because the owner may detect a death later than this host. The product of the two must exceed the
# time after which a silent host is declared lost.
ASK_S = 0.05
ASKS_MAX = 400
# The number of fetches from known copies that may fail before the value is reconstructed.
COPIES_TRIED_MAX = 3


@dataclass(slots=True)
class _Run:
    """One reconstruction."""

    target: int  # the object that will receive the value
    needs: set[int] = field(default_factory=set)  # arguments that are absent
    read: set[int] = field(default_factory=set)  # arguments whose values the task is known to read
    holds: list[Any] = field(default_factory=list)  # holds on the objects that the task names
    oid: int = 0  # the header of the second run; 0: the run has not been submitted
    posted: bool = False
    question: int = 0  # number of the replica query's round about the original value
    brought: bool = False  # the new value is being fetched from the host that ran the task


class Reconstruction:
    """The maker of this node's remote objects (`Maker` in _node/objects/remote_objects.py)."""

    def __init__(
        self,
        results: ResultWriter,
        imports: Imports,
        remote_objects: RemoteObjects,
        lineage: Lineage,
        replica_query: ReplicaQuery,
        send: Callable[[int, PeerMessage], bool],
        loop: LoopPort,
        hints: Hints,
        owners: OwnershipTransfer,
        roster: Roster,
        copies_of: Callable[[int], tuple[int, ...]],
        take_resources: Callable[[int, Demand], None],
    ) -> None:
        """send: as in Peers. copies_of: returns the numbers of other nodes with a copy of an object
        of this host. take_resources: called with a run that needs resources. Once they are
        available, the run is offered to workers."""
        self.results = results
        self.client = results.client
        self.tasks = results.tasks
        self.imports = imports
        self.remote_objects = remote_objects
        self.lineage = lineage
        self.replica_query = replica_query
        self.send = send
        self.loop = loop
        self.hints = hints
        self.owners = owners
        self.roster = roster
        self.copies_of = copies_of
        self.take_resources = take_resources
        self.ranked = _tasks.Ranked(self.tasks)
        self.runs: dict[int, _Run] = {}  # by target
        self.by_run: dict[int, _Run] = {}  # by the header of the second run
        self.begun = 0  # number of runs so far
        self._new: deque[int] = deque()

    # -- the maker of remote objects -----------------------------------------------------------

    def why_not(self, oid: int, remote: RemoteObject) -> str:
        """The reason why the value cannot be found or reconstructed, or "" if it can."""
        record = self.imports.by_oid.get(oid)
        if self.copies_of(oid) or oid in self.by_run:
            return ""
        if record is None:
            return self._not_again(oid)
        return (
            ""
            if self.owners.is_open(record.owner) or record.owner in self.roster.by_host_id
            else _NOT_KEPT
        )

    def _not_again(self, oid: int) -> str:
        """The reason why the task cannot be run again, or "" if it can."""
        header = self.client.inspect(oid)
        if header["kind"] != KIND_TASK:
            return _NOT_KEPT
        if self.lineage.retries(oid):
            return ""
        name, entry = self.client.task_name(oid), self.lineage.entries.get(oid)
        if entry is not None and entry.closed:
            return CLOSED
        if not self.hints.may_run_again(oid):
            return f"{name}() is not run again: it is a call to an actor, or its executor is closed"
        if entry is not None or (header["tries"] and not header["retries_left"]):
            return f"the retries of {name}() are used up"
        if not header["retries_left"]:
            return f"{name}() is not run again (retries=0)"
        limit = format_bytes(self.lineage.bytes_max)
        return f"the lineage of {name}() was dropped (lineage_bytes_max={limit})"

    def make(self, oid: int, remote: RemoteObject) -> None:
        """Begins a reconstruction in a later turn of the loop, because a chain of lost results may
        be too long for recursion."""
        self._new.append(oid)
        self.loop.call_later(0.0, self.poll)

    def forget(self, oid: int) -> None:
        """Ends a reconstruction that is no longer needed."""
        run = self.runs.pop(oid, None)
        if run is not None:
            self._end(run)

    def _end(self, run: _Run) -> None:
        if run.oid:
            self.by_run.pop(run.oid, None)
            self.tasks.cancel(run.oid, False)  # only if it has not begun
        run.holds = []

    # -- polling -------------------------------------------------------------------------------

    def poll(self) -> None:
        """Begins the requested reconstructions, and continues the running ones."""
        while self._new:
            oid = self._new.popleft()
            if self.remote_objects.absent(oid):
                self._begin(oid)
        # Poll the latest run first, because its target is usually an argument of an earlier run.
        for run in reversed(list(self.runs.values())):
            if run.oid:
                self._go_on(run)
            elif run.holds and not any(self.remote_objects.absent(need) for need in run.needs):
                self._needs_are_there(run)
        self.replica_query.flush()

    def _begin(self, oid: int) -> None:
        record, remote = self.imports.by_oid.get(oid), self.remote_objects.by_oid[oid]
        copies = self.copies_of(oid)
        if copies and remote.copies_failed < COPIES_TRIED_MAX:
            self.remote_objects.found(oid, copies, copied=True)
        elif record is not None:
            self._ask_owner(oid, record)
        elif oid in self.by_run:  # the result of a second run was lost before it was fetched
            self._again(self.by_run[oid])
        elif oid not in self.runs:
            self._ask_arguments(oid)

    # -- objects of other owners ---------------------------------------------------------------

    def _ask_owner(self, oid: int, record: ImportRecord) -> None:
        if self.owners.is_open(record.owner):
            return  # the manager will name the new owner
        remote = self.remote_objects.by_oid[oid]
        remote.asked += 1
        if remote.asked > ASKS_MAX:
            self._fail(oid, "its owner knows no node that has it")
        elif remote.asked == 1:
            self._ask(oid, record)
        else:  # the owner has not yet detected the death of a holder
            self.loop.call_later(ASK_S, lambda: self._ask(oid, record))

    def _ask(self, oid: int, record: ImportRecord) -> None:
        if not self.remote_objects.absent(oid) or self.owners.is_open(record.owner):
            return
        if not self.send(record.owner, Reconstruct(record.object, record.number)):
            self._fail(oid, _NOT_KEPT)

    def ask_again(self, oid: int) -> None:
        """Repeats the request after the owner has answered without naming a holder."""
        record = self.imports.by_oid.get(oid)
        if record is not None and self.remote_objects.absent(oid):
            self._ask_owner(oid, record)

    # -- tasks of this host --------------------------------------------------------------------

    def _ask_arguments(self, oid: int) -> None:
        why = self._not_again(oid)
        if why:
            self._fail(oid, why)
            return
        run = self.runs[oid] = _Run(oid)
        named = self.lineage.arguments(oid)
        function, args_oid, *_ = self.tasks.task(oid)
        own = [self.client.hold(part) for part in (oid, function, args_oid) if part]

        def held(holds: list[Any]) -> None:
            if self.runs.get(oid) is not run:
                return
            if None in own:
                self._fail(oid, "its function or its arguments are gone")
            elif None in holds:
                gone = named[holds.index(None)].hex()
                self._fail(
                    oid,
                    f"its task cannot be run again, because its argument ObjectRef({gone}), which "
                    "was put or belongs to another host, is gone: it had no ref left",
                )
            else:
                run.holds = [*own, *holds]
                arguments = {name: hold.oid for name, hold in zip(named, holds, strict=True)}
                run.needs = {
                    argument
                    for argument in arguments.values()
                    if self.remote_objects.absent(argument)
                }
                run.read = {arguments[name] for name in self.lineage.arguments(oid, True)}
                for argument in run.needs:
                    self.remote_objects.make(argument)
                self.loop.call_later(0.0, self.poll)

        self.imports.ask(named, held)

    def _needs_are_there(self, run: _Run) -> None:
        """Runs the task, or fails its result with the error of a failed argument."""
        for need in run.read:
            if self.client.state(need) == STATE["FAILED"]:
                raw = self.results.raw_error(need)
                if raw is not None and not raw.refs:
                    self._settle(run, raw.tobytes())
                    return
        self._start(run)

    def _settle(self, run: _Run, data: bytes) -> None:
        """Makes this payload the object's value or error."""
        self.runs.pop(run.target, None)
        self.remote_objects.replace(run.target, data)
        self._end(run)
        self.loop.call_later(0.0, self.poll)  # the object may be an argument of another run

    def _start(self, run: _Run) -> None:
        oid = run.target
        function, args_oid, args, flags, timeout_ns, tries = self.tasks.task(oid)
        pool = self.tasks.pool_of(oid)
        queue = self.hints.queue_for(pool, bool(flags & TASK_HERE))
        retries = self.lineage.retries(oid)
        if isinstance(queue, str) or not retries:
            self._fail(oid, queue if isinstance(queue, str) else self._not_again(oid))
            return
        run.oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, pool)
        run.holds.append(self.client.hold(run.oid, False))
        self.by_run[run.oid] = run
        self.begun += 1
        run.question = self.replica_query.about(self.remote_objects.by_oid[oid].object)
        self.lineage.entries[oid].spent += 1
        self.tasks.submit(
            run.oid,
            function,
            args,
            args_oid,
            retries - 1,
            timeout_ns,
            flags,
            self.client.task_name(oid).encode()[:32],
            queue,
            False,
            self.tasks.output_owner(oid),
            tries + 1,
        )
        self.ranked.rank(run.oid, *self.ranked.ranks(oid))
        self.tasks.set_retry_delay(run.oid, *self.tasks.retry_delay(oid))
        demand = self.lineage.entries[oid].demand
        if demand:
            run.posted = True
            self.take_resources(run.oid, demand)
        else:
            self._post(run)

    def _post(self, run: _Run) -> None:
        run.posted = self.hints.post(run.oid, bool(self.tasks.task(run.oid)[3] & TASK_HERE))
        if not run.posted:  # the hint queue is full
            self.loop.call_later(ASK_S, self.poll)

    def _go_on(self, run: _Run) -> None:
        """Continues a submitted run."""
        state = self.client.state(run.oid)
        if not run.posted:
            self._post(run)
        elif state == STATE["SPILLED"] and run.oid in self.remote_objects:
            if not run.brought:
                run.brought = True
                self.remote_objects.bring(run.oid, lambda: self._store_full(run))
        elif state == STATE["SPILLED"]:
            self.results.store.restore(run.oid)
        elif state in (STATE["SEALED"], STATE["FAILED"]):
            self._done(run)
        elif state in (STATE["CANCELLED"], STATE["DELETED"], STATE["FREE"]):
            self._fail(run.target, "its task was cancelled while it was being run again")

    def _store_full(self, run: _Run) -> None:
        """Makes readers raise StoreFullError, because the recomputed value does not fit on this
        host."""
        if self.runs.get(run.target) is run:
            name = f"the result of {self.client.task_name(run.target)}(), which was reconstructed"
            error = StoreFullError(f"{name}: {self.results.store.full_message()}")
            self._settle(run, _serialize.encode_error(error, "").tobytes())

    def _done(self, run: _Run) -> None:
        oid = run.target
        got = self.client.view(run.oid)
        if isinstance(got, int) or not self.replica_query.answered(run.question):
            return  # `poll` tries again in the next turn
        self._count(run)
        if self._is_kept(run):
            return
        mem = memoryview(got)
        error = _serialize.payload_kind(mem) == _serialize.ERROR
        # The submitter takes over the refs in a result only once, and has already done so for the
        # first run.
        if not error and _serialize.read_refs(mem):
            self._fail(
                oid, "its task was run again and returned refs, which a lost result cannot hold"
            )
            return
        if error or self.client.inspect(run.oid)["flags"] & FLAG_INLINE:
            self._settle(run, bytes(mem))
            return
        del mem, got  # they pin the block
        if not self.client.hand_over(run.oid, oid):
            self.loop.call_later(ASK_S, self.poll)  # the block is still pinned
            return
        del self.runs[oid]
        self.remote_objects.settled(oid)
        self._end(run)
        self.loop.call_later(0.0, self.poll)  # it may be an argument of another run

    def _is_kept(self, run: _Run) -> bool:
        """Whether the replica query has found a host that still has the original value. If so, that
        value is used, and the recomputed one is discarded."""
        remote, copies = self.remote_objects.by_oid.get(run.target), self.copies_of(run.target)
        if not copies or remote is None or remote.copies_failed >= COPIES_TRIED_MAX:
            return False
        del self.runs[run.target]
        self._end(run)
        self.remote_objects.found(run.target, copies, copied=True)
        self.loop.call_later(0.0, self.poll)  # it may be an argument of another run
        return True

    def _count(self, run: _Run) -> None:
        """Updates the number of used retries. A run that was itself retried has used several."""
        entry = self.lineage.entries.get(run.target)
        if entry is not None:
            left = self.client.inspect(run.oid)["retries_left"]
            entry.spent = self.client.inspect(run.target)["retries_left"] - left

    def _again(self, run: _Run) -> None:
        """Begins again, because the result of the second run was lost before it was fetched."""
        self._count(run)
        self.by_run.pop(run.oid, None)
        del self.runs[run.target]
        self._end(run)
        self._ask_arguments(run.target)

    def _fail(self, oid: int, why: str) -> None:
        run = self.runs.pop(oid, None)
        remote = self.remote_objects.by_oid.get(oid)
        if remote is not None:
            self.remote_objects.fail(oid, ObjectLostError(f"{remote.why or named(remote)}; {why}"))
        if run is not None:
            self._end(run)
            self.loop.call_later(0.0, self.poll)  # it may be an argument of another run


def named(remote: RemoteObject) -> str:
    return f"object {remote.object.hex()} is lost"


_NOT_KEPT = (
    "it is not the result of a task from a living host, so it cannot be recomputed; "
    "put(copies=2) keeps a second copy"
)
