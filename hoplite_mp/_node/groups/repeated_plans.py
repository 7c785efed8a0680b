"""Plans of earlier Group calls, which nodes repeat to begin a later call immediately.

Programs repeat the same call many times. MPI-4 has an interface for that, persistent collectives;
here no interface is needed. Each node keeps the plans of committed calls keyed by the form
(operation, sizes and layouts) of its own members' contributions. When the members pass
contributions of the same form again, the node begins with that plan instead of waiting for a new
one. Its message to the leading node (GroupPart) names the call for which the plan was made. If all
nodes have named the same call, the leading node only waits for the bytes. Otherwise it makes a new
plan, which replaces the attempts that nodes have begun.

Invariant: cells of two plans are never confused. A repeated plan has its own attempt number, which
encodes how many calls ago the plan was made. If some nodes repeat a plan and others do not, the
bytes of the two plans are therefore never mixed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

import msgspec

from hoplite_mp._common import ids
from hoplite_mp._node.groups.group_decisions import (
    ATTEMPT_BITS,
    REPEATED,
    is_repeated,
    operation_of,
    version_of,
)
from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Sequence

    from hoplite_mp._node.groups.group_decisions import Decision
    from hoplite_mp._protocol.group_calls import GroupAttempt, GroupCommit, GroupPart, Piece, Plan
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "LED_EVERY",
    "PART_BYTES_MAX",
    "RepeatedPlans",
    "member_of",
    "named_by_all",
    "repeat",
]

# Plans for larger contributions are not repeated. Higher: a receiver of a broadcast, which does not
# know the size in advance, leases too much memory when the root sends less. Larger allreduces may
# begin early instead (plan_sources.py).
PART_BYTES_MAX = 4 << 20
# One in this many calls of the same form is decided by the leading node, which then receives the
# rates of all links and cuts new stripes if the rates have changed. Higher: unsuitable stripes are
# used longer. Lower: more calls wait for the leading node.
LED_EVERY = 16
FORMS_MAX = 16  # number of forms whose plans are kept

# A kept plan that was begun but then replaced adds IN_VAIN to the form's count, and a repeated plan
# subtracts 1. At the maximum, calls of that form wait for a new plan until the members change,
# because some node's contributions differ from call to call.
IN_VAIN, IN_VAIN_MAX = 2, 4

T = TypeVar("T")
# (kind, operator, root, ranks here, (source, target, bytes, layout) of each of their pieces).
Form: TypeAlias = tuple[str, str, int, tuple[int, ...], tuple[tuple[int, int, int, bytes], ...]]


class RepeatedPlans:
    """The plans that a node may repeat, for one version of a Group's members."""

    def __init__(self) -> None:
        # Form -> (the call for which the plan was made, the attempt, the commit of that call).
        self._kept: dict[Form, tuple[int, GroupAttempt, GroupCommit]] = {}
        # Form -> number of its calls committed by engines since the leading node last decided one.
        self._by_engines: dict[Form, int] = {}
        # The last call made by members on this host.
        self._last_given: tuple[int, Form | None] = 0, None
        self._last_planned = -1  # the last call that could begin with a kept plan
        self._vain: dict[Form, int] = {}

    def clear(self) -> None:
        """Drops all plans, because the members have changed."""
        self._kept.clear()
        self._by_engines.clear()
        self._vain.clear()
        self._last_given, self._last_planned = (0, None), -1

    def next(
        self, members: GroupMembers, part: GroupPart
    ) -> tuple[int, GroupAttempt, GroupCommit] | None:
        """Returns (the call for which the plan was made, an attempt that moves `part`, the commit
        of that call), or None if this node has to wait for a plan."""
        form = _form(part)
        self._last_given = part.call, form
        if form is None or form not in self._kept:
            return None
        first, _, commit = self._kept[form]
        again = self._again(members, form, part.call, part.pieces)
        if again is None:
            return None
        self._last_planned = part.call
        return first, again, commit

    @property
    def is_led(self) -> bool:
        """Whether the leading node decides a call of the last form because engines have committed
        LED_EVERY - 1 such calls. After `next` this refers to the call of `next`, and after
        `committed` to the following call."""
        form = self._last_given[1]
        return form is None or self._by_engines.get(form, 0) >= LED_EVERY - 1

    def _again(
        self, members: GroupMembers, form: Form, call: int, pieces: Sequence[Piece]
    ) -> GroupAttempt | None:
        """The plan kept for this form, adapted to another call. None if the call is too far
        away."""
        first, go, _ = self._kept[form]
        distance = call - first
        if distance >= REPEATED:
            return None
        attempt = _attempt(members, distance)
        operation = operation_of(members, call)
        plans = tuple(_renamed(plan, operation, attempt, pieces) for plan in go.plans)
        return msgspec.structs.replace(go, call=call, attempt=attempt, plans=plans)

    def committed(
        self, members: GroupMembers, commit: GroupCommit, go: GroupAttempt | None, keeps: bool,
        *, by_engines: bool = False,
    ) -> None:  # fmt: skip
        """Records a committed call. go: its attempt, or None if there was none or this node did not
        begin it. keeps: the plan may be repeated. by_engines: engines have committed the call
        without the leading node."""
        given, form = self._last_given
        if commit.call != given or form is None:
            return
        _put(self._by_engines, form, self._by_engines.get(form, 0) + 1 if by_engines else 0)
        repeated = go is not None and is_repeated(go.attempt)
        if self._last_planned == commit.call:
            vain = self._vain.get(form, 0)
            _put(self._vain, form, max(0, vain - 1) if repeated else vain + IN_VAIN)
        too_large = go is not None and any(plan.nbytes >= PART_BYTES_MAX for plan in go.plans)
        if not keeps or too_large or self._vain.get(form, 0) >= IN_VAIN_MAX:
            self._kept.pop(form, None)
        elif go is not None and not repeated and version_of(go.attempt) == members.version:
            # If the versions differ, the commit arrived after a change of the members.
            _put(self._kept, form, (go.call, go, commit))


def _put(table: dict[Form, T], form: Form, value: T) -> None:
    """Adds an entry, and drops the oldest ones beyond FORMS_MAX."""
    table.pop(form, None)
    while len(table) >= FORMS_MAX:
        del table[next(iter(table))]
    table[form] = value


def _form(part: GroupPart) -> Form | None:
    """The form of this node's contributions, which two calls must share to use the same plan. None
    if a piece is small or the contributions are invalid."""
    if part.mistake or any(piece.payload is not None for piece in part.pieces):
        return None
    pieces = tuple((one.source, one.target, one.nbytes, one.layout) for one in part.pieces)
    return part.kind, part.op, part.root, part.ranks, pieces


def _attempt(members: GroupMembers, distance: int) -> int:
    return members.version << ATTEMPT_BITS | REPEATED | distance


def _renamed(plan: Plan, operation: int, attempt: int, pieces: Sequence[Piece]) -> Plan:
    """The plan, adapted to another call. The ids of other nodes' objects are placeholders: the
    nodes that hold the objects know the ids, and cells are requested by operation and attempt."""
    if isinstance(plan, Distribute):
        own = next((piece.object for piece in pieces), _stand_in(0))
        return msgspec.structs.replace(plan, operation=operation, epoch=attempt, object=own)
    size = len(plan.destinations)
    given = {member_of(plan.kind, size, one.source, one.target): one.object for one in pieces}
    objects = tuple(given.get(member, _stand_in(member)) for member in plan.members)
    return msgspec.structs.replace(plan, operation=operation, epoch=attempt, objects=objects)


def _stand_in(member: int) -> bytes:
    """A placeholder for an object's id. It differs for each member, because received bytes are
    counted by id. No host has the id 0."""
    return ids.pack_id(0, 1 + member)


def member_of(kind: str, size: int, source: int, target: int) -> int:
    """The member number of a piece in a plan with `size` destinations."""
    return source * size + target if kind == "alltoall" else source


def named_by_all(members: GroupMembers, parts: Iterable[GroupPart]) -> bool:
    """Whether all nodes have begun with the same plan for these members."""
    named = {(part.version, part.repeats) for part in parts}
    return len(named) == 1 and all(version == members.version and call for version, call in named)


def repeat(outcome: Decision, go: GroupAttempt) -> bool:
    """Replaces newly made plans with the repeated ones. Returns False if the repeated plans are for
    other members or contributions. If only the stripes differ because link rates have changed, no
    later call may repeat these plans."""
    fresh = outcome.plans
    if [_moved(plan) for plan in fresh] != [_moved(plan) for plan in go.plans]:
        return False
    outcome.plans, outcome.attempt, outcome.waits = go.plans, go.attempt, set(go.waits)
    outcome.keeps = [plan.stripes for plan in fresh] == [plan.stripes for plan in go.plans]
    return True


def _moved(plan: Plan) -> Hashable:
    """The sources, destinations and sizes of a plan's transfers."""
    if isinstance(plan, Distribute):
        return plan.sources, plan.receivers, plan.nbytes
    places = plan.members, plan.order, plan.holders, plan.destinations
    return plan.kind, plan.op, places, plan.nbytes, plan.layout, plan.sizes
