"""The state machine of bounded allreduces, which leave out late ranks.

All ranks of a Group hold the same state. The lowest rank in the call leads: it computes each new
state and sends it to the other ranks. The array is divided into slices, and each slice has an
owner. Each rank sends its slices to their owners, folds the slices that it owns, sends the folded
slices to all ranks, and reports to the leading rank which slices have arrived.

    collecting ─► planned ─► the next call
                     │ ▲
                     └─┘  owners are late: other ranks fold their slices

A call is planned when all slices have arrived, or after the deadline. The plan names the ranks
whose slices count (members) and the late owners, whose slices are divided among the other owners.
The call is over when every rank that is in time has all folded slices. Late ranks receive them
later.

When a rank dies or joins, all living ranks take part in a *round*, an allgather of their reports.
`decided` is a pure function of these reports, and selects the latest state among the living ranks.
So a decision of a dead leading rank stands if a living rank has received it. If no living rank has
the result of a planned call, the call begins again.

This component does no I/O: its caller reports events by method calls, and performs the actions that
`take` returns.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hoplite_mp._protocol.group_calls import error_kind, error_of
from hoplite_mp.errors import PeerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

__all__ = [
    "Action",
    "ArrayWork",
    "BoundedCalls",
    "BoundedPlan",
    "BoundedRequest",
    "BoundedState",
    "EndedCall",
    "Finish",
    "Post",
    "Report",
    "SendReport",
    "cover",
    "decided",
    "mistake",
    "slices",
]

# The arrays in a message: slices, slices that a late owner has lost, folded slices, a whole result.
PUSH, MORE, TOTAL, WHOLE = range(4)
# Kinds of messages without arrays: reports to the leading rank, and a new state from it (NEXT).
ARRIVED, FOLDED, TAKEN, REQUESTED, NEXT = range(5)


@dataclass(frozen=True, slots=True)
class BoundedRequest:
    """One rank's call. `text` contains the arguments that must be equal on all ranks. If `gathers`,
    every rank receives the whole arrays of all ranks, and nothing is folded. `error` and `message`
    are the kind and the text of this rank's error, or ""."""

    text: str
    op: str
    num: int
    deadline: float  # in seconds
    gathers: bool = False
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class BoundedPlan:
    """The plan of a call. `members`: the ranks whose slices are in the result. `owners`: the ranks
    that own slices at the start. `late`: for each stage, the owners that lose their slices. These
    slices are divided among the remaining owners."""

    members: tuple[int, ...]
    owners: tuple[int, ...]
    late: tuple[tuple[int, ...], ...] = ()
    gathers: bool = False

    @property
    def dropped(self) -> frozenset[int]:
        return frozenset(rank for stage in self.late for rank in stage)

    @property
    def owning(self) -> tuple[int, ...]:
        """The ranks that own slices now."""
        return tuple(rank for rank in self.owners if rank not in self.dropped)


@dataclass(frozen=True, slots=True)
class EndedCall:
    """A call that is over. The state keeps it until all ranks have taken its result."""

    call: int
    epoch: int
    text: str
    view: tuple[int, ...]  # the ranks that were alive
    plan: BoundedPlan | None  # None: all ranks raise the error
    error: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class BoundedState:
    """The state that all ranks have in common."""

    view: tuple[int, ...]  # the ranks of the last round
    call: int = 0  # the number of the next call
    epoch: int = 0  # number of times this call has begun again
    plan: BoundedPlan | None = None
    text: str = ""  # `text`, `op` and `num` of the planned request
    op: str = ""
    num: int = 1
    ended: tuple[EndedCall, ...] = ()
    taken: tuple[tuple[int, int], ...] = ()  # (rank, number of the rank's next call)
    new: tuple[int, ...] = ()  # ranks that joined too late for this call
    deadline: float = 0.0  # in seconds after the planning
    round: int = 0  # number of rounds so far
    step: int = 0  # number of new states since the last round

    @property
    def receivers(self) -> tuple[int, ...]:
        """The ranks that make this call."""
        return tuple(rank for rank in self.view if rank not in self.new)

    @property
    def leader(self) -> int:
        """The rank that computes the next state."""
        return min(self.receivers or self.view)


@dataclass(frozen=True, slots=True)
class Report:
    """A rank's message to all others in a round. `whole`: whether the rank has the result of the
    planned call. `taken`: the number of the rank's next call. `lacks`: the ended calls whose
    results the rank still needs. `keeps`: the ended calls whose results the rank has."""

    state: BoundedState | None  # None for a new rank
    whole: bool
    taken: int
    lacks: tuple[int, ...]
    keeps: tuple[int, ...]


def slices(plan: BoundedPlan) -> list[Slice]:
    """The slices of the array, in order. If a slice had a late owner, its `parts` are the slices
    into which it was divided."""
    counts: Counter[tuple[int, int]] = Counter()

    def new(owner: int, stage: int) -> Slice:
        counts[owner, stage] += 1
        return Slice(owner, stage, counts[owner, stage] - 1)

    found = [new(owner, 0) for owner in plan.owners]
    leaves = found
    remaining = list(plan.owners)
    for number, late in enumerate(plan.late, 1):
        remaining = [rank for rank in remaining if rank not in late]
        for one in leaves:
            if one.owner in late:
                one.parts = [new(owner, number) for owner in remaining]
        leaves = [leaf for one in leaves for leaf in (one.parts or [one])]
    return found


@dataclass(slots=True)
class Slice:
    """A range of the array. `place`: its index among the slices assigned to its owner in this
    stage."""

    owner: int
    stage: int
    place: int
    parts: list[Slice] = field(default_factory=list)


def bounds(size: int, plan: BoundedPlan) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(owner, stage) -> the bounds (begin, end) of this owner's slices in an array of `size`
    elements."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def divide(some: Sequence[Slice], begin: int, end: int) -> None:
        for at, one in enumerate(some):
            first = begin + (end - begin) * at // len(some)
            last = begin + (end - begin) * (at + 1) // len(some)
            found.setdefault((one.owner, one.stage), []).append((first, last))
            divide(one.parts, first, last)

    divide(slices(plan), 0, size)
    return found


def cover(missing: Sequence[tuple[int, int]]) -> tuple[set[int], set[int]]:
    """(late receivers, late sources), chosen so that each missing pair (receiver, source) contains
    a late rank. A greedy algorithm: each step chooses the rank in the most remaining pairs. Ties
    are resolved in favour of sources, then of higher ranks."""
    receivers: set[int] = set()
    sources: set[int] = set()
    left = set(missing)
    while left:
        counts = Counter((0, receiver) for receiver, _ in left)
        counts.update((1, source) for _, source in left)
        side, rank = max(counts, key=lambda one: (counts[one], one))
        (sources if side else receivers).add(rank)
        left = {pair for pair in left if pair[side] != rank}
    return receivers, sources


def planned(
    view: Sequence[int], has: Mapping[int, int], request: BoundedRequest, *, closes: bool
) -> BoundedPlan | None:
    """The plan; None if the call has to wait, or too few ranks are in time. has: for each owner, a
    mask of the ranks whose slices have arrived there. closes: whether the deadline has passed."""
    missing = [(o, r) for o in view for r in view if not has[o] >> r & 1]
    if missing and not closes:
        return None
    late, out = cover(missing)
    members = tuple(rank for rank in view if rank not in out)
    need = min(request.num, len(view))
    if len(members) < need or len(view) - len(late) < _owners_min(need, len(view)):
        return None
    stages = (tuple(sorted(late)),) if late else ()
    return BoundedPlan(members, tuple(view), stages, request.gathers)


def _owners_min(need: int, size: int) -> int:
    """The minimum number of owners that must remain. With fewer owners, folding would take longer
    than waiting for the late owners."""
    return max(need, (size + 1) // 2)


def advanced(
    plan: BoundedPlan, view: Sequence[int], has: Mapping[int, int], num: int, *, closes: bool
) -> tuple[bool, BoundedPlan]:
    """(whether the call is over, the call's plan). has: for each rank, a mask of the owners whose
    folded slices have arrived there."""
    sources = plan.members if plan.gathers else plan.owning
    missing = [(p, o) for p in view for o in sources if not has[p] >> o & 1]
    need = min(num, len(view))
    late = {receiver for receiver, _ in missing}
    if late <= plan.dropped and len(view) - len(late) >= need:
        return True, plan
    if not closes:
        return False, plan
    receivers, owners = cover(missing)
    if not owners:
        return len(view) - len(receivers) >= need, plan
    remain = len(plan.owning) - len(owners)
    if plan.gathers or remain < _owners_min(need, len(plan.owners)):
        return False, plan
    return False, replace(plan, late=(*plan.late, tuple(sorted(owners))))


def _disagreement(requests: Mapping[int, BoundedRequest]) -> tuple[str, str]:
    """(kind, text) of the error that all ranks raise; ("", "") if there is none."""
    first = min(requests, default=0)
    for rank, one in sorted(requests.items()):
        if one.error:
            return one.error, f"rank {rank}: {one.message}"
    for rank, one in sorted(requests.items()):
        if one != requests[first]:
            return "value", (
                f"ranks {first} and {rank} of a bounded allreduce differ: "
                f"{requests[first].text} and {one.text}"
            )
    return "", ""


def decided(reports: Mapping[int, Report]) -> BoundedState:
    """The state after a round in which the living ranks have sent these reports."""
    view = tuple(sorted(reports))
    known = [one.state for one in reports.values() if one.state is not None]
    before = max(known, key=lambda one: (one.round, one.step), default=BoundedState(view))
    new = {rank for rank, one in reports.items() if one.state is None}
    state = replace(before, view=view, round=before.round + 1, step=0)
    lost = _lost(before, reports)
    late = tuple(sorted((set(state.new) & set(view)) | new)) if known else ()
    if state.plan is None:
        changed = bool(lost) or view != before.view
        state = replace(state, new=tuple(set(late) - new), epoch=state.epoch + changed)
    elif any(one.whole for one in reports.values()):
        state = _over(state, state.plan)
    elif lost:
        state = replace(state, plan=None, new=late, epoch=state.epoch + 1)
    else:
        state = replace(state, new=late)
    first = {rank: state.call + (rank in state.new) for rank in new}
    taken = {rank: first.get(rank, reports[rank].taken) for rank in view}
    return _without_taken(replace(state, taken=tuple(sorted(taken.items()))))


def _without_taken(state: BoundedState) -> BoundedState:
    """The state without the ended calls that all ranks have taken."""
    first = min(count for _, count in state.taken)
    return replace(state, ended=tuple(one for one in state.ended if one.call >= first))


def _lost(before: BoundedState, reports: Mapping[int, Report]) -> set[int]:
    """The ranks whose members have died since the last round, including ranks that now have new
    members."""
    if all(one.state is None for one in reports.values()):
        return set()  # the first round
    return {r for r in before.view if r not in reports or reports[r].state is None}


def _over(
    state: BoundedState, plan: BoundedPlan | None, error: str = "", message: str = ""
) -> BoundedState:
    ended = EndedCall(state.call, state.epoch, state.text, state.view, plan, error, message)
    return replace(
        state, call=state.call + 1, epoch=0, plan=None, text="", op="", num=1, new=(),
        ended=(*state.ended, ended),
    )  # fmt: skip


class Post(NamedTuple):
    """Send arrays to a rank."""

    to: int
    what: int
    call: int
    epoch: int
    stage: int
    arrays: list[Any]


class SendReport(NamedTuple):
    """Send a report to the leading rank, or the next state to another rank."""

    to: int
    report: tuple[Any, ...]  # (what, call, epoch, stage, value)


class Finish(NamedTuple):
    """This rank's call is over. `value`: the array, or the list of the members' arrays if the call
    gathers; None after an error."""

    call: int
    value: Any
    ended: EndedCall | None
    error: BaseException | None


Action: TypeAlias = Post | SendReport | Finish


@dataclass(slots=True)
class ArrayWork:
    """The functions that divide, fold and join arrays."""

    cut: Callable[[Any, int, int], Any]  # (array, begin, end)
    size: Callable[[Any], int]
    fold: Callable[[str, list[Any]], Any]  # (op, arrays in the order of ranks)
    join: Callable[[list[Any]], Any]


@dataclass(slots=True)
class Arrays:
    """The arrays of one call that have arrived."""

    slices: dict[tuple[int, int], list[Any]] = field(default_factory=dict)  # by (source, stage)
    totals: dict[tuple[int, int], list[Any]] = field(default_factory=dict)  # by (owner, stage)
    whole: list[Any] | None = None  # the result, if another rank has sent it


class BoundedCalls:
    """One rank's part in the bounded allreduces of a Group."""

    def __init__(self, rank: int, operation: ArrayWork, late_calls_max: int = 4) -> None:
        """late_calls_max: see `Config.group_late_calls_max`."""
        self.rank = rank
        self.operation = operation
        self._late_calls_max = late_calls_max
        self.state: BoundedState | None = None  # None: before the first round
        self.next = 0  # the number of this rank's next call
        self.request: BoundedRequest | None = None  # this rank's request for the call `next`
        # This rank's (request, array) for each call that is not over.
        self._given: dict[int, tuple[BoundedRequest, Any]] = {}
        self._requested_at = self._planned_at = self._led_at = 0.0
        self._arrays: dict[tuple[int, int], Arrays] = {}  # by (call, epoch)
        # Each (call, epoch, stage) in which this rank has sent its slices, or has folded slices.
        self._pushed: set[tuple[int, int, int]] = set()
        self._folded: set[tuple[int, int, int]] = set()
        # The last report sent for each (call, epoch, what).
        self._reports_sent: dict[tuple[int, int, int], int] = {}
        # Reports received by the leading rank: (call, epoch, what) -> rank -> a mask of ranks.
        self._reports: dict[tuple[int, int, int], dict[int, int]] = {}
        self._taken: dict[int, int] = {}
        self._requests: dict[int, tuple[int, BoundedRequest]] = {}  # rank -> (call, request)
        self._request_sent: tuple[int, int] | None = None  # (round, call) of the last request sent
        self._orphans: set[int] = set()  # ended calls whose result no living rank has
        self._actions: list[Action] = []

    def take(self) -> list[Action]:
        """Removes and returns the pending actions."""
        found, self._actions = self._actions, []
        return found

    # -- events --------------------------------------------------------------------------------

    def ask(self, request: BoundedRequest, array: Any, now: float) -> None:
        """Records the next call made by this rank's program."""
        self.request, self._requested_at = request, now
        if not request.error:
            self._given[self.next] = request, array

    def receive(
        self, source: int, what: int, call: int, epoch: int, stage: int, arrays: Any
    ) -> None:
        """Stores arrays received from a rank."""
        state = self.state
        if state is not None and (call, epoch) < self._oldest(state):
            return
        of = self._arrays.setdefault((call, epoch), Arrays())
        if what == WHOLE:
            of.whole = arrays
        else:
            (of.totals if what == TOTAL else of.slices)[source, stage] = arrays

    def receive_report(self, source: int, report: tuple[Any, ...], now: float) -> None:
        """Handles a report or a new state from another rank."""
        what, call, epoch, stage, value = report
        if what == NEXT:
            state = self.state
            if state is not None and (value.round, call) == (state.round, state.step + 1):
                self._adopt(value, now)
        elif what == TAKEN:
            self._taken[source] = value
        elif what == REQUESTED:
            self._requests[source] = call, value
        else:
            self._reports.setdefault((call, epoch, what + 2 * stage), {})[source] = value

    def _oldest(self, state: BoundedState) -> tuple[int, int]:
        """The oldest (call, epoch) whose arrays this rank may still need."""
        ended = ((one.call, one.epoch) for one in state.ended)
        return min(ended, default=(state.call, state.epoch))

    # -- arrived data ----------------------------------------------------------------------------

    def _of(self, call: int, epoch: int) -> Arrays:
        return self._arrays.setdefault((call, epoch), Arrays())

    def arrived(self) -> int:
        """A mask of the ranks whose data has arrived here: their slices or whole arrays before the
        call is planned and if it gathers, otherwise all their folded slices."""
        state = self.state
        if state is None:
            return 0
        of = self._of(state.call, state.epoch)
        if state.plan is None or state.plan.gathers:
            return sum(1 << source for source, stage in of.slices if not stage)
        owners = state.plan.owning
        return sum(1 << owner for owner in owners if self._has_all_of(state.plan, owner, of))

    @staticmethod
    def _has_all_of(plan: BoundedPlan, owner: int, of: Arrays) -> bool:
        stages = {stage for one, stage in bounds(0, plan) if one == owner}
        return all((owner, stage) in of.totals for stage in stages)

    def _result(self, ended: EndedCall) -> list[Any] | None:
        """The arrays that form an ended call's result, in order; None while some are missing."""
        of = self._of(ended.call, ended.epoch)
        plan = ended.plan
        assert plan is not None
        if of.whole is not None:
            return of.whole
        if plan.gathers:
            if any((member, 0) not in of.slices for member in plan.members):
                return None
            return [of.slices[member, 0][0] for member in plan.members]
        found: list[Any] = []

        def collect(some: Sequence[Slice]) -> bool:
            for one in some:
                total = of.totals.get((one.owner, one.stage))
                if total is not None:
                    found.append(total[one.place])
                elif not one.parts or not collect(one.parts):
                    return False
            return True

        return found if collect(slices(plan)) else None

    def missing(self, ended: EndedCall) -> list[int]:
        """The ranks whose arrays for an ended call have not arrived."""
        plan, of = ended.plan, self._of(ended.call, ended.epoch)
        if plan is None or self._result(ended) is not None:
            return []
        if plan.gathers:
            return [member for member in plan.members if (member, 0) not in of.slices]
        return [owner for owner in plan.owning if not self._has_all_of(plan, owner, of)]

    # -- rounds --------------------------------------------------------------------------------

    def report(self) -> Report:
        """This rank's contribution to a round."""
        state = self.state
        ended = [one for one in (() if state is None else state.ended) if one.plan is not None]
        has = {one.call: self._result(one) is not None for one in ended}
        lacks = tuple(call for call, whole in has.items() if call >= self.next and not whole)
        keeps = tuple(call for call, whole in has.items() if whole)
        planned_call = None if state is None else self._planned(state)
        whole = planned_call is not None and self._result(planned_call) is not None
        return Report(state, whole, self.next, lacks, keeps)

    @staticmethod
    def _planned(state: BoundedState) -> EndedCall | None:
        """The planned call, as if it had ended."""
        if state.plan is None:
            return None
        return EndedCall(state.call, state.epoch, state.text, state.view, state.plan)

    def decide(self, reports: Mapping[int, Report], now: float) -> None:
        """Adopts the state that follows from the reports of a round."""
        before, state = self.state, decided(reports)
        if before is None:
            self.next = dict(state.taken)[self.rank]
        self._adopt(state, now)
        self._reports_sent.clear()  # another rank may lead now
        if before is None:
            return
        living = {rank for rank, one in reports.items() if one.state is not None}
        lost = set(before.view) - living
        for rank in lost:
            self._requests.pop(rank, None)  # a new member with this rank sends its own request
        for one in state.ended if lost else ():
            latest = any(about.state and about.state.call <= one.call for about in reports.values())
            whole = {r for r, about in reports.items() if about.whole} if latest else set()
            keeps = {r for r, about in reports.items() if one.call in about.keeps} | whole
            lacks = {r for r, about in reports.items() if one.call in about.lacks}
            if latest:
                lacks |= {r for r in living if reports[r].taken <= one.call and r not in keeps}
            self._give(one, lacks, keeps, living)

    def _adopt(self, state: BoundedState, now: float) -> None:
        """Adopts a state, and discards the data of calls before it."""
        before, self.state = self.state, state
        if before is None or (before.plan, before.call) != (state.plan, state.call):
            self._planned_at = now
        self._taken = dict(state.taken) | {
            rank: max(count, dict(state.taken)[rank])
            for rank, count in self._taken.items()
            if rank in state.view and before is not None and before.round == state.round
        }
        self._given = {call: one for call, one in self._given.items() if call >= state.call}
        oldest = self._oldest(state)
        everything: tuple[dict[Any, Any], ...] = (self._arrays, self._reports_sent, self._reports)
        for kept in everything:
            for key in [key for key in kept if key[:2] < oldest]:
                del kept[key]
        for some in (self._pushed, self._folded):
            some -= {key for key in some if key[:2] < oldest}

    def _give(
        self, ended: EndedCall, lacks: set[int], keeps: set[int], living: Collection[int]
    ) -> None:
        """Called after a rank has died. The lowest rank that has the call's result sends it to the
        ranks that may never receive it from the owners."""
        plan = ended.plan
        if plan is None or not lacks:
            return
        if set(plan.members if plan.gathers else plan.owning) <= set(living):
            return
        if not keeps:
            self._orphans.add(ended.call)
        elif min(keeps) == self.rank:
            for rank in sorted(lacks):
                self._post(rank, WHOLE, ended.call, ended.epoch, 0, self._result(ended) or [])

    @property
    def leads(self) -> bool:
        """Whether this rank computes the next state."""
        return self.state is not None and self.state.leader == self.rank

    def wants_round(self, alive: int) -> bool:
        """Whether this rank has to begin a round. alive: a mask of the living ranks."""
        state = self.state
        if state is None:
            return True
        died = any(not alive >> rank & 1 for rank in state.view)
        return died and self.request is not None

    def lead(self, now: float) -> None:
        """Computes new states, and sends each to all other ranks."""
        self._led_at = now
        while self.leads and (state := self._next_state(now)) is not None:
            assert self.state is not None
            taken = tuple((rank, self._taken.get(rank, count)) for rank, count in state.taken)
            state = replace(state, step=self.state.step + 1, taken=taken)
            state = _without_taken(state)
            self._adopt(state, now)
            for rank in state.view:
                if rank != self.rank:
                    self._actions.append(SendReport(rank, (NEXT, state.step, 0, 0, state)))

    def _next_state(self, now: float) -> BoundedState | None:
        """The next state; None if nothing has changed."""
        state, closes = self.state, self._closes(now)
        assert state is not None
        if state.plan is not None:
            has = self._reported(FOLDED)
            over, plan = advanced(state.plan, state.receivers, has, state.num, closes=closes)
            if over:
                return _over(state, plan)
            return replace(state, plan=plan) if plan != state.plan else None
        requests = {r: one for r, (call, one) in self._requests.items() if call == state.call}
        if self.request is not None and self.next == state.call:
            requests[self.rank] = self.request
        requests = {rank: one for rank, one in requests.items() if rank in state.receivers}
        error, message = _disagreement(requests)
        if error:
            return _over(state, None, error, message)
        if self.rank not in requests:
            return None
        requesting = sum(1 << rank for rank in requests)
        has = {rank: some & requesting for rank, some in self._reported(ARRIVED).items()}
        request = requests[self.rank]
        plan_made = planned(state.receivers, has, request, closes=closes)
        if plan_made is None:
            return None
        return replace(
            state, plan=plan_made, text=request.text, op=request.op, num=request.num,
            deadline=request.deadline,
        )  # fmt: skip

    def _reported(self, what: int) -> dict[int, int]:
        state = self.state
        assert state is not None
        stage = len(state.plan.late) if state.plan is not None else 0
        reports = self._reports.get((state.call, state.epoch, what + 2 * stage), {})
        return {r: self.arrived() if r == self.rank else reports.get(r, 0) for r in state.view}

    def _closes(self, now: float) -> bool:
        state = self.state
        if state is None or not self.leads:
            return False
        due = self.due()
        return due is not None and now >= due and (state.plan is not None or not self._crowded)

    @property
    def _crowded(self) -> bool:
        """Whether a rank is so late that the call waits for it even after the deadline."""
        state = self.state
        assert state is not None
        first = min(self._taken.get(rank, count) for rank, count in state.taken)
        return state.call - first >= self._late_calls_max

    def due(self) -> float | None:
        """The time of the current deadline; None if this rank is waiting for no deadline."""
        state, request = self.state, self.request
        if state is None or not self.leads:
            return None
        if state.plan is not None:
            return self._planned_at + state.deadline
        if request is None or state.call != self.next:
            return None
        return self._requested_at + request.deadline

    def wakes_at(self) -> float | None:
        """The time at which `lead` must be called even if no event occurs; None if no deadline is
        pending. The time is in the past if the deadline has passed since the last call to
        `lead`."""
        due = self.due()
        return None if due is None or due <= self._led_at else due

    # -- between rounds --------------------------------------------------------------------------

    def _post(
        self, to: int, what: int, call: int, epoch: int, stage: int, arrays: list[Any]
    ) -> None:
        if to == self.rank:
            self.receive(to, what, call, epoch, stage, arrays)
        else:
            self._actions.append(Post(to, what, call, epoch, stage, arrays))

    def turn(self, departed: Callable[[int, int], bool] = lambda call, rank: False) -> None:
        """Performs all sends, folds, reports and finishes that the arrived data allows.
        departed(call, rank): whether nothing more will arrive from the rank's member in that
        call."""
        state = self.state
        if state is None:
            return
        if state.call in self._given:
            self._push(state, *self._given[state.call])
        if state.plan is not None and not state.plan.gathers:
            self._fold(state, state.plan)
        self._send_report(state)
        self._finish(state, departed)

    def _push(self, state: BoundedState, request: BoundedRequest, array: Any) -> None:
        """Sends this rank's slices to their owners."""
        call, epoch = state.call, state.epoch
        plan = state.plan
        if plan is None:
            plan = BoundedPlan(state.receivers, state.receivers, (), request.gathers)
        elif self.rank not in plan.members:
            return
        if plan.gathers:
            if (call, epoch, 0) not in self._pushed:
                self._pushed.add((call, epoch, 0))
                for rank in self._others_first(state):
                    self._post(rank, PUSH, call, epoch, 0, [array])
            return
        size, cut = self.operation.size(array), self.operation.cut
        for stage in range(len(plan.late) + 1):
            if (call, epoch, stage) in self._pushed:
                continue
            self._pushed.add((call, epoch, stage))
            cuts = bounds(size, plan)
            for owner in self._others_first(state):
                if (owner, stage) in cuts:
                    parts = [cut(array, begin, end) for begin, end in cuts[owner, stage]]
                    self._post(owner, PUSH if not stage else MORE, call, epoch, stage, parts)

    def _others_first(self, state: BoundedState) -> list[int]:
        """The ranks in the call, beginning with the next higher rank, so that not all ranks send to
        the same rank first."""
        return sorted(state.receivers, key=lambda rank: (rank <= self.rank, rank))

    def _fold(self, state: BoundedState, plan: BoundedPlan) -> None:
        """Folds the slices that this rank owns, and sends them to all ranks."""
        call, epoch = state.call, state.epoch
        of = self._of(call, epoch)
        if self.rank not in plan.owning:
            return
        for (owner, stage), some in bounds(0, plan).items():
            if owner != self.rank or (call, epoch, stage) in self._folded:
                continue
            if any((member, stage) not in of.slices for member in plan.members):
                continue
            self._folded.add((call, epoch, stage))
            given = [of.slices[member, stage] for member in plan.members]
            fold = self.operation.fold
            totals = [fold(state.op, [one[at] for one in given]) for at in range(len(some))]
            for rank in self._others_first(state):
                self._post(rank, TOTAL, call, epoch, stage, totals)

    def _send_report(self, state: BoundedState) -> None:
        """Reports to the leading rank which data has arrived here."""
        stage = len(state.plan.late) if state.plan is not None else 0
        what = ARRIVED if state.plan is None else FOLDED
        key, value = (state.call, state.epoch, what + 2 * stage), self.arrived()
        if self.leads:
            return
        asks = self.request is not None and self.next == state.call
        if asks and self._request_sent != (state.round, state.call):
            self._request_sent = state.round, state.call
            report: tuple[Any, ...] = (REQUESTED, state.call, 0, 0, self.request)
            self._actions.append(SendReport(state.leader, report))
        if self._reports_sent.get(key, 0) != value:
            self._reports_sent[key] = value
            report = what, state.call, state.epoch, stage, value
            self._actions.append(SendReport(state.leader, report))

    def _finish(self, state: BoundedState, departed: Callable[[int, int], bool]) -> None:
        """Finishes this rank's call if the result has arrived."""
        ended = next((one for one in state.ended if one.call == self.next), None)
        request = self.request
        if request is None or ended is None:
            return
        error: BaseException | None = None
        value: Any = None
        if ended.error:
            error = error_of(ended.error, ended.message)
        elif request.error:
            error = error_of(request.error, f"rank {self.rank}: {request.message}")
        elif request.text != ended.text:
            text = f"rank {self.rank} of a bounded allreduce differs from the other ranks"
            error = ValueError(f"{text}: {request.text} and {ended.text}")
        else:
            found = self._result(ended)
            if found is None:
                gone = ended.call in self._orphans
                if not gone or not all(departed(ended.call, r) for r in self.missing(ended)):
                    return
                error = PeerLostError("this rank was late for a call whose result is now lost")
            else:
                value = found if request.gathers else self.operation.join(found)
        call, self.next = self.next, self.next + 1
        self._taken[self.rank] = self.next
        self.request = None
        if not self.leads:
            self._actions.append(SendReport(state.leader, (TAKEN, call, 0, 0, self.next)))
        self._actions.append(Finish(call, value, ended, error))


def mistake(error: Exception) -> BoundedRequest:
    """The request of a rank whose arguments are wrong."""
    return BoundedRequest("", "", 1, 1.0, error=error_kind(error), message=str(error))
