"""Plans of earlier calls of a Group, by which its nodes begin a later call at once.

A program makes the same call again and again; MPI-4 has an interface for that, the persistent
collectives, and here it needs none. Without this module each node tells the leading one what its
members give, and waits for a plan, although that will be the last one once more. So each node keeps
the plans of committed calls, by what its own members gave to them. If they give the same again, it
begins by that plan, and says in its GroupPart whose plan it is. If all nodes have named the same
one, the leading node only waits for the bytes; if not, it makes a plan as for any call, which
replaces what was begun.

Invariant: cells of two plans never meet. A repeated plan has an attempt of its own, in which its
distance from the call that it was made for stands; so what one node has received by a plan that the
others did not repeat is never taken for something else.
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
    from hoplite_mp._protocol.group_calls import GroupCommit, GroupGo, GroupPart, Piece, Plan
    from hoplite_mp._protocol.messages import GroupMembers

__all__ = [
    "LED_EVERY",
    "PART_BYTES_MAX",
    "RepeatedPlans",
    "member_of",
    "named_by_all",
    "repeat",
]

# A plan of a larger part is not repeated. Higher: a receiver of a broadcast, which cannot know how
# much comes, leases so much memory in vain when the root gives less; and of a large allreduce the
# last members are waited for in another way (plan_sources.py).
PART_BYTES_MAX = 4 << 20
# One in so many calls that are alike goes by way of the leading node, which hears the rates of all
# links, and cuts other stripes if they have changed. Higher: wrong stripes last longer. Lower: more
# calls take the longer way.
LED_EVERY = 16
FORMS_MAX = 16  # of how many different calls the plans are kept

# A plan that turns out to have been begun in vain counts so much, and one that was repeated takes 1
# away; at the maximum, calls of that form wait for a plan until the members change, because what
# some node gives differs from call to call.
IN_VAIN, IN_VAIN_MAX = 2, 4

T = TypeVar("T")
# (kind, operator, root, ranks here, (source, target, bytes, layout) of each piece that they give).
Form: TypeAlias = tuple[str, str, int, tuple[int, ...], tuple[tuple[int, int, int, bytes], ...]]


class RepeatedPlans:
    """The plans that one node may repeat, for one version of a Group's members."""

    def __init__(self) -> None:
        # (number of the call it was made for, it, the commit of that call)
        self._kept: dict[Form, tuple[int, GroupGo, GroupCommit]] = {}
        # How many calls of that form the engines have committed since the leading node last did.
        self._by_engines: dict[Form, int] = {}
        self._last_given: tuple[int, Form | None] = 0, None  # the last call of this node's members
        self._last_planned = -1  # the last call that could begin by a kept plan
        self._vain: dict[Form, int] = {}

    def clear(self) -> None:
        """Called when the members change: plans of other members are of no use."""
        self._kept.clear()
        self._by_engines.clear()
        self._vain.clear()
        self._last_given, self._last_planned = (0, None), -1

    def next(
        self, members: GroupMembers, part: GroupPart
    ) -> tuple[int, GroupGo, GroupCommit] | None:
        """(the call for which the plan was made, the attempt by which this node can begin to move
        `part`, the commit of that call); None: it has to wait for a plan."""
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
        """Is a call in the form of the last one the leading node's to decide, because the engines
        have committed so many? After `next` this is about the call that `next` was asked for, and
        after `committed` about the one that follows."""
        form = self._last_given[1]
        return form is None or self._by_engines.get(form, 0) >= LED_EVERY - 1

    def _again(
        self, members: GroupMembers, form: Form, call: int, pieces: Sequence[Piece]
    ) -> GroupGo | None:
        """The plan that is kept for that form, for another call; None: it is too far away."""
        first, go, _ = self._kept[form]
        distance = call - first
        if distance >= REPEATED:
            return None
        attempt = _attempt(members, distance)
        operation = operation_of(members, call)
        plans = tuple(_renamed(plan, operation, attempt, pieces) for plan in go.plans)
        return msgspec.structs.replace(go, call=call, attempt=attempt, plans=plans)

    def committed(
        self, members: GroupMembers, commit: GroupCommit, go: GroupGo | None, keeps: bool,
        *, by_engines: bool = False,
    ) -> None:  # fmt: skip
        """A call is committed, by this attempt; None: by one that this node has not made, or
        without any. `keeps`: its plan may be repeated. by_engines: they have
        committed it, without the leading node."""
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
            # Else the word of its commit has come after the members have changed.
            _put(self._kept, form, (go.call, go, commit))


def _put(table: dict[Form, T], form: Form, value: T) -> None:
    """As the newest of at most FORMS_MAX."""
    table.pop(form, None)
    while len(table) >= FORMS_MAX:
        del table[next(iter(table))]
    table[form] = value


def _form(part: GroupPart) -> Form | None:
    """What two calls must have in common for this node; None: a piece is small, or wrong."""
    if part.mistake or any(piece.payload is not None for piece in part.pieces):
        return None
    pieces = tuple((one.source, one.target, one.nbytes, one.layout) for one in part.pieces)
    return part.kind, part.op, part.root, part.ranks, pieces


def _attempt(members: GroupMembers, distance: int) -> int:
    return members.version << ATTEMPT_BITS | REPEATED | distance


def _renamed(plan: Plan, operation: int, attempt: int, pieces: Sequence[Piece]) -> Plan:
    """The plan for another call. Objects of other nodes have names that mean nothing: the nodes
    that hold them know the right ones, and cells are asked for by operation and attempt."""
    if isinstance(plan, Distribute):
        own = next((piece.object for piece in pieces), _stand_in(0))
        return msgspec.structs.replace(plan, operation=operation, epoch=attempt, object=own)
    size = len(plan.destinations)
    given = {member_of(plan.kind, size, one.source, one.target): one.object for one in pieces}
    objects = tuple(given.get(member, _stand_in(member)) for member in plan.members)
    return msgspec.structs.replace(plan, operation=operation, epoch=attempt, objects=objects)


def _stand_in(member: int) -> bytes:
    """In the place of an object's id. Different for each member, because what has come of each is
    counted by its name; no host has the id 0."""
    return ids.pack_id(0, 1 + member)


def member_of(kind: str, size: int, source: int, target: int) -> int:
    """The number of a piece's member in a plan with `size` destinations."""
    return source * size + target if kind == "alltoall" else source


def named_by_all(members: GroupMembers, parts: Iterable[GroupPart]) -> bool:
    """Whether all nodes have begun by the same plan, made for these members."""
    named = {(part.version, part.repeats) for part in parts}
    return len(named) == 1 and all(version == members.version and call for version, call in named)


def repeat(outcome: Decision, go: GroupGo) -> bool:
    """Puts the repeated plans in the place of newly made ones. False: they are of other members or
    parts, so they cannot be. If only the stripes differ, because links have other rates now, no
    later call may repeat the old ones."""
    fresh = outcome.plans
    if [_moved(plan) for plan in fresh] != [_moved(plan) for plan in go.plans]:
        return False
    outcome.plans, outcome.attempt, outcome.waits = go.plans, go.attempt, set(go.waits)
    outcome.keeps = [plan.stripes for plan in fresh] == [plan.stripes for plan in go.plans]
    return True


def _moved(plan: Plan) -> Hashable:
    """From where to where a plan moves how many bytes."""
    if isinstance(plan, Distribute):
        return plan.sources, plan.receivers, plan.nbytes
    places = plan.members, plan.order, plan.holders, plan.destinations
    return plan.kind, plan.op, places, plan.nbytes, plan.layout, plan.sizes
