"""Which plan of an earlier call a node begins with, and which it forgets."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hoplite_mp._node.groups.group_decisions import (
    ATTEMPT_BITS,
    REPEATED,
    UndecidedCall,
    decide,
    is_repeated,
)
from hoplite_mp._node.groups.repeated_plans import (
    FORMS_MAX,
    LED_EVERY,
    PART_BYTES_MAX,
    RepeatedPlans,
    named_by_all,
    repeat,
)
from hoplite_mp._planner import tree_shapes
from hoplite_mp._planner.link_speeds import HostRates
from hoplite_mp._protocol.group_calls import GroupAttempt, GroupCommit, GroupPart, Piece
from hoplite_mp._protocol.messages import Distribute, ExecuteReduce, GroupMembers

VERSION = 3
NBYTES = 1 << 20
LAYOUT = b"shape (131072,) and dtype <i8"
MADE = VERSION << ATTEMPT_BITS | 1


def members(version: int = VERSION) -> GroupMembers:
    stripes = tree_shapes.cut([(0, 1), (1, 1), (2, 1)])
    return GroupMembers("g", 5, 0, 3, 0b111, 0, True, version, (0, 1, 2), stripes)


def part(rank: int, call: int, kind: str = "allreduce", nbytes: int = NBYTES) -> GroupPart:
    name = bytes([1 + rank, call, *bytes(14)])
    targets = range(3) if kind == "alltoall" else [-1]
    pieces = tuple(Piece(rank, target, nbytes, None, name, LAYOUT) for target in targets)
    if kind == "broadcast" and rank != 1:
        pieces = ()
    op = "sum" if kind == "allreduce" else ""
    return GroupPart(5, VERSION, call, (rank,), kind, op, 1, pieces)


def made(call: int, rates: dict[int, HostRates] | None = None, **about: Any) -> GroupAttempt:
    """The plan of the leading node."""
    given = {rank: part(rank, call, **about) for rank in range(3)}
    outcome = decide(UndecidedCall(members(), call, MADE, (0, 1, 2), given, rates or {}))
    return GroupAttempt(5, call, MADE, outcome.plans, tuple(sorted(outcome.waits)))


def commit(call: int) -> GroupCommit:
    return GroupCommit(5, call, (0, 1, 2), "allreduce", "sum", 1)


def after(rank: int, call: int, **about: Any) -> RepeatedPlans:
    """Those of a node on which that call was committed."""
    plans = RepeatedPlans()
    assert plans.next(members(), part(rank, call, **about)) is None
    plans.committed(members(), commit(call), made(call, **about), keeps=True)
    return plans


def test_last_plan_of_an_equal_call_is_repeated() -> None:
    for kind in ("allreduce", "broadcast", "allgather", "alltoall", "gather"):
        first = made(4, kind=kind)
        for rank in range(3):
            given = part(rank, 6, kind=kind)
            found = after(rank, 4, kind=kind).next(members(), given)
            assert found is not None
            call, go, before = found
            assert before.call == 4
            assert call == 4
            assert (go.call, go.waits) == (6, first.waits)
            assert go.attempt == VERSION << ATTEMPT_BITS | REPEATED | 2
            assert is_repeated(go.attempt)
            assert not is_repeated(first.attempt)
            (plan,), (before,) = go.plans, first.plans
            (fresh,) = made(6, kind=kind).plans
            assert plan.operation == fresh.operation != before.operation
            assert plan.epoch == go.attempt
            own = {piece.object for piece in given.pieces}
            if isinstance(plan, Distribute):
                assert rank != 1 or own == {plan.object}
                continue
            assert isinstance(fresh, ExecuteReduce)
            both = list(zip(plan.objects, fresh.objects, strict=True))
            assert {one for one, name in both if one == name} == own
            others = [one for one, name in both if one != name]
            assert len(set(others)) == len(others)  # what has come is counted by name


def test_different_call_waits_for_a_plan() -> None:
    plans = after(1, 4)
    others = [
        part(1, 5, nbytes=NBYTES + 8),
        part(1, 5, kind="allgather"),
        msgspec.structs.replace(part(1, 5), op="max"),
        msgspec.structs.replace(part(1, 5), root=2),
        msgspec.structs.replace(part(1, 5), mistake="no"),
        msgspec.structs.replace(part(1, 5), pieces=(Piece(1, -1, 8, bytes(8), layout=LAYOUT),)),
    ]
    for given in others:
        assert plans.next(members(), given) is None
    assert plans.next(members(), part(1, 5)) is not None


def test_plan_is_repeated_up_to_the_maximum_distance() -> None:
    plans = after(0, 4)
    assert plans.next(members(), part(0, 4 + REPEATED - 1)) is not None
    assert plans.next(members(), msgspec.structs.replace(part(0, 5), call=4 + REPEATED)) is None


def test_plans_of_changed_or_failed_calls_are_not_kept() -> None:
    plans = after(0, 4)
    plans.clear()  # the members have changed
    assert plans.next(members(), part(0, 5)) is None

    plans = RepeatedPlans()
    plans.next(members(), part(0, 4))
    plans.committed(members(VERSION + 1), commit(4), made(4), keeps=True)  # made for other members
    assert plans.next(members(), part(0, 5)) is None

    plans = after(0, 4)
    plans.next(members(), part(0, 5))
    plans.committed(members(), commit(5), made(5), keeps=False)
    assert plans.next(members(), part(0, 6)) is None

    assert after(0, 4, nbytes=PART_BYTES_MAX).next(members(), part(0, 5)) is None
    large = part(0, 5, nbytes=PART_BYTES_MAX)
    assert after(0, 4, nbytes=PART_BYTES_MAX).next(members(), large) is None

    plans = RepeatedPlans()  # a commit of a call that members here have not made
    plans.next(members(), part(0, 3))
    plans.committed(members(), commit(4), made(4), keeps=True)
    assert plans.next(members(), part(0, 5)) is None


def test_number_of_kept_plans_is_bounded() -> None:
    plans = RepeatedPlans()
    for call in range(FORMS_MAX + 1):
        nbytes = NBYTES + 8 * call
        assert plans.next(members(), part(0, call, nbytes=nbytes)) is None
        plans.committed(members(), commit(call), made(call, nbytes=nbytes), keeps=True)
    assert plans.next(members(), part(0, 20)) is None
    assert plans.next(members(), part(0, 20, nbytes=NBYTES + 8)) is not None


def test_repeated_plan_keeps_the_number_of_its_first_call() -> None:
    plans = after(0, 4)
    for call in (5, 6):
        found = plans.next(members(), part(0, call))
        assert found is not None
        assert found[0] == 4
        plans.committed(members(), commit(call), found[1], keeps=True)
    plans.next(members(), part(0, 7))
    # The leading node has made one again.
    plans.committed(members(), commit(7), made(7), keeps=True)
    found = plans.next(members(), part(0, 8))
    assert found is not None
    assert found[0] == 7


def test_plan_is_repeated_only_if_all_nodes_name_it() -> None:
    said = [msgspec.structs.replace(part(rank, 6), repeats=5) for rank in range(3)]
    assert named_by_all(members(), said)
    assert not named_by_all(members(VERSION + 1), said)
    for other in (
        msgspec.structs.replace(said[2], repeats=0),
        msgspec.structs.replace(said[2], repeats=4),
        msgspec.structs.replace(said[2], version=VERSION + 1),
    ):
        assert not named_by_all(members(), [*said[:2], other])
    assert not named_by_all(members(), [part(rank, 6) for rank in range(3)])


def test_plan_with_outdated_stripes_is_repeated_once_more() -> None:
    given = {rank: part(rank, 6) for rank in range(3)}
    first = made(4)
    found = after(0, 4).next(members(), part(0, 6))
    assert found is not None
    for narrow, keeps in ((1e8, True), (2e7, False)):
        rates = {0: HostRates(1e8, 1e8), 1: HostRates(1e8, 1e8), 2: HostRates(narrow, narrow)}
        outcome = decide(UndecidedCall(members(), 6, found[1].attempt, (0, 1, 2), given, rates))
        assert repeat(outcome, found[1])
        assert outcome.plans == found[1].plans
        assert outcome.attempt == found[1].attempt
        assert outcome.waits == set(first.waits)
        assert outcome.keeps == keeps
        assert outcome.commit(members(), 6, 1, 0).keeps == keeps


def test_plan_without_a_new_member_is_not_repeated() -> None:
    """A receiver of a scatter gives nothing, so what its node gives does not say who is there."""

    def scatter(rank: int, call: int, ranks: tuple[int, ...]) -> GroupPart:
        name = bytes([1 + rank, call, *bytes(14)])
        pieces = [Piece(1, target, NBYTES, None, name, LAYOUT) for target in range(3)]
        return GroupPart(
            5, VERSION, call, ranks, "scatter", "", 1, tuple(pieces[: 3 * (rank == 1)])
        )

    def decided(call: int, ranks: tuple[int, ...]) -> Any:
        given = {rank: scatter(rank, call, (rank,)) for rank in ranks}
        return decide(UndecidedCall(members(), call, MADE, ranks, given, {}))

    first = decided(4, (0, 1))
    plans = RepeatedPlans()
    assert plans.next(members(), scatter(0, 4, (0,))) is None
    go = GroupAttempt(5, 4, MADE, first.plans, tuple(sorted(first.waits)))
    plans.committed(members(), commit(4), go, keeps=True)
    assert plans.next(members(), scatter(0, 5, (0, 2))) is None  # it came to this node
    found = plans.next(members(), scatter(0, 5, (0,)))
    assert found is not None
    assert repeat(decided(5, (0, 1)), found[1])
    assert not repeat(decided(5, (0, 1, 2)), found[1])  # it came to another


@pytest.mark.parametrize("planned", [True, False])
def test_plan_abandoned_twice_is_not_repeated(planned: bool) -> None:
    """Instead, the call went by a plan of its own, or was small on the one rank that gives."""
    plans = after(0, 4)
    call = 5
    for _ in range(2):
        assert plans.next(members(), part(0, call)) is not None
        plans.committed(members(), commit(call), made(call) if planned else None, keeps=True)
        call += 1
    for _ in range(3):
        assert plans.next(members(), part(0, call)) is None
        plans.committed(members(), commit(call), made(call), keeps=True)
        call += 1
    plans.clear()
    plans.next(members(), part(0, call))
    plans.committed(members(), commit(call), made(call), keeps=True)
    assert plans.next(members(), part(0, call + 1)) is not None


@pytest.mark.parametrize(("every", "goes_on"), [(2, False), (3, True)])
def test_successful_repeats_offset_abandoned_ones(every: int, goes_on: bool) -> None:
    plans = after(0, 4)
    for call in range(5, 60):
        found = plans.next(members(), part(0, call))
        if found is None:
            break
        vain = call % every == 0
        plans.committed(members(), commit(call), None if vain else found[1], keeps=True)
    assert (found is not None) == goes_on


def steady(*calls: int) -> RepeatedPlans:
    """Rank 1 has made these calls, which were committed; a plan was made for the first one."""
    plans = RepeatedPlans()
    for call in calls:
        found = plans.next(members(), part(1, call))
        go = made(call) if found is None else found[1]
        plans.committed(members(), commit(call), go, keeps=True, by_engines=found is not None)
    return plans


def test_every_nth_call_of_a_form_is_led() -> None:
    plans = steady(*range(4, 4 + LED_EVERY))
    assert plans.is_led
    plans.next(members(), part(1, 50, nbytes=NBYTES + 8))
    assert not plans.is_led, "of another form"
    plans.next(members(), part(1, 51))
    assert plans.is_led
    plans.committed(members(), commit(51), None, keeps=True)  # by the leading node
    assert not plans.is_led
