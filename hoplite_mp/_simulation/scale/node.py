"""A simplified node. Simulations of thousands of nodes use it, because so many real nodes do not
fit into one process.

Like _node/collectives/operations.py it reports sources, and like _node/objects/imports.py it
imports objects from other nodes. It makes only one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.ids import unpack_id
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.fields import FOLDING, copy_offset
from hoplite_mp._protocol.membership import MembersChanged
from hoplite_mp._protocol.messages import (
    Commit,
    Distribute,
    ExecuteReduce,
    FetchComplete,
    FetchRequested,
    ReduceRequested,
    SourceReady,
    StripesComplete,
    Withdraw,
)
from hoplite_mp._simulation.scale.streams import WrongCompletion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from hoplite_mp._planner.program import Cell as Name
    from hoplite_mp._planner.program import Program
    from hoplite_mp._protocol.messages import NodeToManager
    from hoplite_mp._simulation.scale.streams import (
        Content,
        Key,
        ScaleCell,
        ScaleEngine,
        ScaleOracle,
    )

__all__ = [
    "HOST_ID_BASE",
    "MANAGER_HOST",
    "CollectiveRequest",
    "Executions",
    "ScaleHost",
    "ScaleNode",
    "Wait",
]


# An operation's number contains the number of the requesting node above this bit, and the node's
# incarnation and a counter in the lower bits.
OPERATION_BITS = 40
FIRST_OPERATION = 1 << 24 | 1


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """The arguments of a collective."""

    kind: str
    sources: tuple[bytes, ...]
    num: int
    results: tuple[bytes, ...] = ()


class ScaleNode:
    """One simulated node."""

    def __init__(self, host: ScaleHost) -> None:
        self.host = host
        self.executions = Executions(host)
        self.operation = host.number << OPERATION_BITS | FIRST_OPERATION
        self._collective: CollectiveRequest | None = None
        self._wait = Wait("")
        self._unanswered: set[bytes] = set()  # sources whose owner has not replied yet
        # Holders of the sources that other hosts own.
        self._holders: dict[bytes, tuple[int, ...]] = {}
        # Sources that are not ready yet -> their indices.
        self._pending: dict[bytes, list[int]] = {}

    # ---- requests of a process

    def get(self, object_id: bytes) -> Wait:
        """Makes a process on this host call get() for a ready object."""
        wait = Wait(f"a get on host {self.host.number}")
        if object_id in self.host.holds:
            wait.ended_at = self.host.timeline.now
        else:
            self.host.reads[object_id] = wait
            self.host.request_holders(object_id, self.executions.fetch)
        return wait

    def begin(self, collective: CollectiveRequest) -> Wait:
        """Makes a process on this host call a collective."""
        self._collective = collective
        self._wait = Wait(f"{collective.kind} of host {self.host.number}")
        others = [one for one in dict.fromkeys(collective.sources) if not self.host.is_own(one)]
        self._unanswered.update(others)
        for object_id in others:
            self.host.request_holders(object_id, self._holders_received)
        if not others:
            self._request(collective)
        return self._wait

    def _holders_received(self, object_id: bytes, holders: tuple[int, ...]) -> None:
        self._holders[object_id] = holders
        if object_id not in self._unanswered:
            self.ready(object_id)
            return
        self._unanswered.remove(object_id)
        if not self._unanswered and self._collective is not None:
            self._request(self._collective)

    def ready(self, object_id: bytes) -> None:
        """Reports a source that has become ready to the manager."""
        for index in self._pending.pop(object_id, ()):
            nbytes, layout, (first, *others) = self._source_info(object_id)
            message = SourceReady(self.operation, index, first, nbytes, layout, tuple(others))
            self.host.send_manager(message)

    def _request(self, collective: CollectiveRequest) -> None:
        ready: list[int] = []
        for index, object_id in enumerate(collective.sources):
            if self._source_info(object_id)[2]:
                ready.append(index)
            else:
                self._pending.setdefault(object_id, []).append(index)
        sources = [self._source_info(collective.sources[index]) for index in ready]
        self.host.send_manager(
            ReduceRequested(
                self.operation,
                self.host.number,
                1,
                collective.sources,
                "sum",
                collective.num,
                results=collective.results,
                kind=collective.kind,
                ready=tuple(ready),
                ready_nbytes=tuple(nbytes for nbytes, _, _ in sources),
                ready_layouts=tuple(layout for _, layout, _ in sources),
                ready_holders=tuple(holders for _, _, holders in sources),
            )
        )

    def _source_info(self, object_id: bytes) -> tuple[int, bytes, tuple[int, ...]]:
        nbytes = self.host.oracle.sizes[object_id]
        own = self.host.is_own(object_id)
        holders = self.host.holders(object_id) if own else self._holders[object_id]
        return nbytes, b"float32 %d" % nbytes, holders

    # ---- messages of the manager

    def receive(self, message: Any) -> None:
        """Handles a message from the manager."""
        match message:
            case Distribute():
                self.executions.distribute(message)
            case Withdraw():
                self.executions.withdraw(message.epoch)
            case ExecuteReduce():
                self.executions.execute(message)
            case Commit():
                self.host.oracle.check_commit(message)
                self.executions.commit(message)
                if message.operation == self.operation and self._collective is not None:
                    self._end(self._collective, message)
            case MembersChanged(removed=()):
                pass  # an announcement of new nodes
            case _:
                raise WrongCompletion(f"unexpected message without a fault: {message!r}")

    def _end(self, collective: CollectiveRequest, commit: Commit) -> None:
        if len(commit.contributors) != collective.num:
            raise WrongCompletion(f"{commit}, and {collective.num} contributors were requested")
        for number in () if collective.kind in FOLDING else commit.destinations:
            for index in commit.contributors:
                if collective.sources[index] not in self.host.hosts[number].holds:
                    raise WrongCompletion(f"{commit}, but host {number} lacks source {index}")
        self._wait.ended_at = self.host.timeline.now


# One host's part in plans: creates the cells of Distribute and ExecuteReduce messages.
#
# It sends the same messages as _node/collectives/, and creates the same cells from a program, as
# long as nothing fails. Every fold is a sum of float32. If a program has two names for the same
# bytes, both refer to one cell, as in the node.


ITEM_BYTES = 4
# Interval for advancing a cell that is served while another plan receives its bytes; see
# _node/execution/plan_cells.py.
WINDOW_S = 0.004


@dataclass(slots=True, eq=False)
class ScalePart:
    """This host's part in one plan."""

    plan: Distribute | ExecuteReduce
    program: Program
    bounds: list[tuple[int, int]]  # (begin, end) of each stripe, in bytes of the whole object
    cells: list[ScaleCell] = field(default_factory=list)
    made: dict[Name, ScaleCell] = field(default_factory=dict)  # by their names in the program
    missing: set[Name] = field(default_factory=set)
    running: set[Name] = field(default_factory=set)
    queue: list[Name] = field(default_factory=list)  # cells that are pulled later
    # Cells served while another plan receives their bytes.
    growing: list[ScaleCell] = field(default_factory=list)

    def key(self, name: Name) -> Key:
        """Returns the key with which other hosts request the cell."""
        return self.plan.operation, self.plan.epoch, name.stripe, name.part

    def object(self, stripe: int) -> bytes:
        """Returns the object that this stripe copies. Only for plans that copy."""
        plan = self.plan
        return plan.object if isinstance(plan, Distribute) else plan.objects[stripe]

    def reach(self, begin: int, end: int) -> int:
        """Returns how many consecutive bytes from `begin` on have arrived, up to `end`."""
        at = begin
        for first, last in sorted((cell.begin, cell.begin + cell.watermark) for cell in self.cells):
            if first <= at < last:
                at = last
        return min(at, end) - begin


class Executions:
    """The plans that one host executes."""

    def __init__(self, host: ScaleHost) -> None:
        self.host = host
        self.copying: dict[int, ScalePart] = {}  # plans that copy one object, by epoch
        self.parts: dict[int, ScalePart] = {}  # plans with several sources, by operation
        # Plans by which an object is being received, by object.
        self._receiving: dict[bytes, ScalePart] = {}

    # ---- messages of the manager

    def fetch(self, object_id: bytes, holders: tuple[int, ...]) -> None:
        """Requests from the manager a copy that a process needs."""
        host, nbytes = self.host, self.host.oracle.sizes[object_id]
        host.send_manager(FetchRequested(host.number, object_id, nbytes, holders))

    def distribute(self, plan: Distribute) -> None:
        """Begins this host's part in copying one object."""
        part = self.copying[plan.epoch] = self._part(plan)
        here, older = plan.object in self.host.holds, self._receiving.get(plan.object)
        if here or older:
            if part.program.pulls:
                raise WrongCompletion(
                    f"{plan} sends host {self.host.number} an object that it has or receives"
                )
        elif not part.program.pulls:
            raise WrongCompletion(
                f"{plan} reads from host {self.host.number}, which lacks the object"
            )
        else:
            self._receiving[plan.object] = part
        self._make(part, older)
        self._pull_more(part)
        if part.growing:
            self.host.timeline.after(0.0, self._grow, part)

    def withdraw(self, epoch: int) -> None:
        """Ends this host's part in copying one object, and closes its cells."""
        part = self.copying.pop(epoch, None)
        if part is not None:
            self._close(part)

    def execute(self, plan: ExecuteReduce) -> None:
        """Begins this host's part in a collective with several sources."""
        part = self._part(plan)
        at = dict(zip(plan.members, plan.objects, strict=True))
        gone = {index for _, index in part.program.given if at[index] not in self.host.holds}
        if gone or plan.operation in self.parts:
            raise WrongCompletion(f"{plan} on host {self.host.number}, which lacks {gone}")
        if part.program.is_empty:
            return
        self.parts[plan.operation] = part
        self._make(part, None)
        self._pull_more(part)
        self._report_completion(part)

    def commit(self, message: Commit) -> None:
        """Called when the operation is complete on all hosts. Checks the results, and closes all
        cells."""
        part = self.parts.pop(message.operation, None)
        if part is None:
            return
        plan, result = part.plan, part.program.result
        assert isinstance(plan, ExecuteReduce)
        if plan.kind == "reduce_scatter":
            for name in result:
                bounds = part.bounds[name.stripe]
                self.host.oracle.check_result(plan, message, [part.made[name]], *bounds)
        elif plan.kind in FOLDING and self.host.number in plan.destinations:
            cells = [part.made[name] for name in result]
            self.host.oracle.check_result(plan, message, cells, 0, plan.nbytes)
        self._close(part)

    # ---- cells

    def _part(self, plan: Distribute | ExecuteReduce) -> ScalePart:
        return ScalePart(plan, program_of(plan, self.host.number), _bounds_of(plan))

    def _make(self, part: ScalePart, older: ScalePart | None) -> None:
        """Creates all cells of a plan. older: the plan that is receiving the bytes that this plan
        serves."""
        program, made = part.program, part.made
        pulled = {pull.cell for pull in program.pulls}
        served = {serve.cell for serve in program.serves}
        result, members = set(program.result), dict(program.given)
        # A fold with one source is that source under a second name.
        single = {fold.cell: fold.sources[0] for fold in program.folds if len(fold.sources) == 1}
        second = {source: name for name, source in single.items() if source in pulled}

        def make(name: Name, content: Content = None) -> ScaleCell:
            begin, end = part.bounds[name.stripe]
            watermark = 0 if content is None else end - begin
            if older:
                watermark = older.reach(begin, end)
            key = part.key(name) if name in served else None
            made[name] = self.host.engine.cell(key, begin, end - begin, content, watermark)
            part.cells.append(made[name])
            return made[name]

        for pull in program.pulls:
            made[pull.cell] = make(second.get(pull.cell, pull.cell))
            self._expect(part, pull.cell)
            part.queue.append(pull.cell)
        for fold in program.folds:
            name, first = fold.cell, fold.sources[0]
            if name in made:
                continue
            if name in single and first in members and name not in result:
                make(name, members[first])
                continue
            cell = make(name)
            sources = [made.get(one) or make(one, members[one]) for one in fold.sources]
            if cell.nbytes:
                self._expect(part, name)
                self.host.engine.fold(cell, sources)
        for serve in program.serves:
            if serve.cell not in made:  # an object that other hosts copy from this host
                cell = make(serve.cell, part.object(serve.cell.stripe))
                part.growing += [cell] if older else []

    def _grow(self, part: ScalePart) -> None:
        """Advances cells that are served while another plan receives their bytes. Repeats until all
        bytes have arrived."""
        source = self._receiving.get(part.object(0))
        for cell in part.growing:
            arrived = source.reach(cell.begin, cell.begin + cell.nbytes) if source else cell.nbytes
            if arrived > cell.watermark:
                self.host.engine.raise_to(cell, arrived)
        if source:
            self.host.timeline.after(WINDOW_S, self._grow, part)

    def _close(self, part: ScalePart) -> None:
        for cell in part.cells:
            self.host.engine.close(cell)

    # ---- completion

    def _expect(self, part: ScalePart, name: Name) -> None:
        part.missing.add(name)
        part.made[name].filled = partial(self._filled, part, name)

    def _pull_more(self, part: ScalePart) -> None:
        most = part.program.inbound_max or len(part.queue)
        while part.queue and len(part.running) < most:
            name = part.queue.pop(0)
            part.running.add(name)
            server = self.host.hosts[name.node].engine
            self.host.engine.pull(part.made[name], server, part.key(name))

    def _filled(self, part: ScalePart, name: Name) -> None:
        part.missing.remove(name)
        part.running.discard(name)
        if isinstance(part.plan, Distribute):
            if not part.missing:
                self._copied(part.plan, part)
            return
        if part.plan.kind not in FOLDING:
            object_id = part.object(name.stripe)
            self.host.oracle.check_copy(object_id, [part.made[name]])
            self.host.put(object_id)
        self._pull_more(part)
        self._report_completion(part)

    def _copied(self, plan: Distribute, part: ScalePart) -> None:
        del self._receiving[plan.object]
        self.host.oracle.check_copy(plan.object, part.cells)
        if not part.program.serves:
            self.withdraw(plan.epoch)
        self.host.put(plan.object)
        self.host.send_manager(FetchComplete(self.host.number, plan.object, plan.epoch))

    def _report_completion(self, part: ScalePart) -> None:
        if not part.missing and part.program.reports:
            plan, number = part.plan, self.host.number
            self.host.send_manager(StripesComplete(plan.operation, plan.epoch, number))


def _bounds_of(plan: Distribute | ExecuteReduce) -> list[tuple[int, int]]:
    """(begin, end) of each stripe, in bytes of the whole object."""
    if isinstance(plan, Distribute):
        return [
            (copy_offset(plan.nbytes, one.begin_share), copy_offset(plan.nbytes, one.end_share))
            for one in plan.stripes
        ]
    if plan.kind not in FOLDING:
        return [(0, nbytes) for nbytes in plan.sizes]
    count = plan.nbytes // ITEM_BYTES
    if plan.kind == "reduce_scatter":  # as numpy.array_split
        size, longer = divmod(count, len(plan.results))
        edges = [size * k + min(k, longer) for k in range(len(plan.results) + 1)]
        cut = list(pairwise(edges))
    else:
        cut = [(count * s.begin_share >> 20, count * s.end_share >> 20) for s in plan.stripes]
    return [(begin * ITEM_BYTES, end * ITEM_BYTES) for begin, end in cut]


# The state that the parts of a simulated node share: its objects, its engine, its messages.
#
# All plans of a host fill cells of one engine and leave objects on that host, whichever node has
# requested them. Hosts are identified by number, which is also their node's number.


MANAGER_HOST = 0
# Host ids are consecutive from this number; in production they are random.
HOST_ID_BASE = 1000
# Size of a message between nodes about one object.
PEER_MESSAGE_BYTES = 100


@dataclass(slots=True, eq=False)
class Wait:
    """A process's wait for a result; `ended_at` is None until the wait has ended."""

    what: str
    ended_at: float | None = None


class ScaleHost:
    """One simulated host."""

    def __init__(
        self,
        engine: ScaleEngine,
        oracle: ScaleOracle,
        hosts: Sequence[ScaleHost],
        manager: Callable[[NodeToManager], None],
    ) -> None:
        """hosts: all hosts by number, including this one; manager: called with each message to the
        manager."""
        self.engine = engine
        self.number = engine.host
        self.oracle = oracle
        self.hosts = hosts
        self.timeline = engine.network.timeline
        self.holds: set[bytes] = set()
        self.reads: dict[bytes, Wait] = {}  # objects for which a process on this host is waiting
        self._manager = manager
        self._copies_at: dict[bytes, set[int]] = {}  # objects of this host -> hosts with a copy
        # Pending objects of this host -> the hosts that get a reply once they are ready.
        self._waiting_hosts: dict[bytes, list[tuple[ScaleHost, Callable[..., None]]]] = {}

    # ---- messages

    def send(self, to: int, nbytes: int, call: Callable[..., None], *message: Any) -> None:
        """Sends a message to another host, which calls `call` when it arrives."""
        network = self.engine.network
        left_at = network.leaves_at(self.number, to, nbytes)
        self.timeline.at(left_at + network.delay(self.number, to), call, *message)

    def send_manager(self, message: NodeToManager) -> None:
        """Sends a message to the manager."""
        self.send(MANAGER_HOST, len(encode(message)), self._manager, message)

    # ---- objects

    def put(self, object_id: bytes) -> None:
        """Called when the object is complete on this host, so that other hosts may read it."""
        self.holds.add(object_id)
        for host, reply in self._waiting_hosts.pop(object_id, ()):
            self._reply(object_id, host, reply)
        if object_id in self.reads:
            self.reads.pop(object_id).ended_at = self.timeline.now
        if not self.is_own(object_id):
            owner = self._owner(object_id)
            self.send(owner.number, PEER_MESSAGE_BYTES, owner._copied, object_id, self.number)

    def is_own(self, object_id: bytes) -> bool:
        """Whether this host owns the object."""
        return self._owner(object_id) is self

    def holders(self, object_id: bytes) -> tuple[int, ...]:
        """Returns the hosts that hold an object of this host. The result is empty if the object is
        pending."""
        here = (self.number,) if object_id in self.holds else ()
        return (*here, *sorted(self._copies_at.get(object_id, ())))

    def request_holders(
        self, object_id: bytes, reply: Callable[[bytes, tuple[int, ...]], None]
    ) -> None:
        """Requests the object's holders from its owner. The owner replies immediately and, if the
        object is pending, again when it is ready."""
        owner = self._owner(object_id)
        self.send(
            owner.number, PEER_MESSAGE_BYTES, owner._holders_requested, object_id, self, reply
        )

    def _holders_requested(
        self, object_id: bytes, host: ScaleHost, reply: Callable[..., None]
    ) -> None:
        if object_id not in self.holds:
            self._waiting_hosts.setdefault(object_id, []).append((host, reply))
        self._reply(object_id, host, reply)

    def _reply(self, object_id: bytes, host: ScaleHost, reply: Callable[..., None]) -> None:
        holders = self.holders(object_id)
        self.send(host.number, PEER_MESSAGE_BYTES, reply, object_id, holders)

    def _copied(self, object_id: bytes, number: int) -> None:
        self._copies_at.setdefault(object_id, set()).add(number)

    def _owner(self, object_id: bytes) -> ScaleHost:
        return self.hosts[unpack_id(object_id)[0] - HOST_ID_BASE]
