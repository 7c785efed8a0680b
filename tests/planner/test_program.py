"""What one node pulls is what the other serves, for every kind, shape and size."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._planner import tree_shapes
from hoplite_mp._planner.link_speeds import LinkSpeeds
from hoplite_mp._planner.program import (
    INBOUND_PARENTS_MAX,
    PROGRAMS_MAX,
    ProgramCache,
    participants,
    program_of,
    tree_children,
    tree_parent,
    waits_for,
)
from hoplite_mp._planner.repair import repaired, widest
from hoplite_mp._protocol import messages as m
from tests.support.planner_edges import check_edges

ID = bytes(16)
SHAPES = ("stripes", "tree:1", "tree:2", "tree:3")
FOLDING = ("reduce", "allreduce", "reduce_scatter")
KINDS = (*FOLDING, "gather", "allgather", "alltoall")


@st.composite
def topologies(draw: st.DrawFn, nodes: int) -> LinkSpeeds:
    speeds = LinkSpeeds()
    rates = st.sampled_from([1e7, 1.25e8, 1.25e9])
    for node in range(nodes):
        if draw(st.booleans()):
            speeds.measure_host(node, draw(rates), draw(rates))
    return speeds


@st.composite
def plans(draw: st.DrawFn) -> m.ExecuteReduce:
    """Any collective between up to 12 nodes, as the planner's components would make it."""
    nodes = draw(st.integers(1, 12))
    node = st.integers(0, nodes - 1)
    kind = draw(st.sampled_from(KINDS))
    holders = tuple(draw(st.lists(node, min_size=1, max_size=16)))
    members = tuple(range(len(holders)))
    ordered = draw(st.booleans())
    order = members if ordered else tuple(draw(st.permutations(members)))
    unique = kind not in ("reduce_scatter", "alltoall")
    destinations = tuple(draw(st.lists(node, min_size=1, max_size=12, unique=unique)))
    if kind in ("reduce", "gather"):
        destinations = destinations[:1]
    stripes: tuple[m.Stripe, ...] = ()
    shape = "stripes"
    if kind in FOLDING:
        sent: dict[int, int] = {}
        for index in order:
            sent[holders[index]] = sent.get(holders[index], 0) + 1
        speeds = draw(topologies(nodes))
        nbytes = draw(st.sampled_from([8, 1 << 17, 1 << 26]))
        leaving = draw(st.sets(node, max_size=2))
        best = tree_shapes.reduction(
            kind, nbytes, sent, destinations, speeds, ordered=ordered, leaving=leaving
        )
        stripes, shape = best.stripes, best.shape
        if kind == "allreduce" and not ordered and draw(st.booleans()):
            shape = draw(st.sampled_from(SHAPES))
        elif kind == "reduce" and not ordered and draw(st.booleans()):
            shape, stripes = (
                draw(st.sampled_from(SHAPES)),
                tree_shapes.single_vertex(destinations[0]),
            )
        elif kind != "reduce_scatter" and draw(st.booleans()) and shape == "stripes":
            able = {*sent, *destinations} - {draw(node)}
            stripes = repaired(stripes, able) or stripes
    ids = (ID,) * len(members)
    rule = "fold" if ordered else "any"
    return m.ExecuteReduce(
        7, 1, members, order, stripes, rule, kind, "sum", 0, ids, holders, destinations, shape=shape
    )


@given(plans())
@settings(max_examples=100, deadline=None)
def test_programs_of_collectives_match_pulls_with_serves(plan: m.ExecuteReduce) -> None:
    check_edges(plan)
    assert waits_for(plan) <= set(participants(plan))


@st.composite
def spreads(draw: st.DrawFn) -> m.Distribute:
    nodes = draw(st.integers(2, 12))
    order = draw(st.permutations(range(nodes)))
    cut = draw(st.integers(1, min(3, nodes - 1)))
    sources, receivers = tuple(order[:cut]), tuple(order[cut:])
    speeds = draw(topologies(nodes))
    nbytes = draw(st.sampled_from([8, 1 << 17, 1 << 26]))
    best = tree_shapes.spread(nbytes, sources[0], receivers, speeds)
    shape, stripes = best.shape, best.stripes
    if draw(st.booleans()):
        shape = draw(st.sampled_from(SHAPES[1:]))
        stripes = tree_shapes.single_vertex(sources[0])
    return m.Distribute(1 << 63, ID, 1, nbytes, sources, receivers, stripes, shape)


@given(spreads())
@settings(max_examples=75, deadline=None)
def test_programs_of_copies_match_pulls_with_serves(plan: m.Distribute) -> None:
    check_edges(plan)


def test_late_receiver_pulls_from_receiving_owners() -> None:
    stripes = (m.Stripe(1, 0, 1000), m.Stripe(2, 1000, m.SHARES))
    plan = m.Distribute(1 << 63, ID, 2, 1 << 26, (1,), (3,), stripes, "stripes")
    check_edges(plan, growing=frozenset({2}))
    assert [pull.parent for pull in program_of(plan, 3).pulls] == [1, 2]


@pytest.mark.parametrize("degree", [1, 2, 3, 7])
def test_tree_parents_and_children_match(degree: int) -> None:
    for count in range(1, 30):
        below = [child for place in range(count) for child in tree_children(place, degree, count)]
        assert below == list(range(1, count))
        for place in range(1, count):
            assert place in tree_children(tree_parent(place, degree), degree, count)


def test_source_of_a_broadcast_sends_one_copy() -> None:
    for count in range(1, 12):
        best = tree_shapes.spread(1 << 26, 0, range(1, count + 1), LinkSpeeds())
        receivers = tuple(range(1, count + 1))
        plan = m.Distribute(1 << 63, ID, 1, 1 << 26, (0,), receivers, best.stripes, best.shape)
        sent = sum(
            pull.end_share - pull.begin_share
            for node in receivers
            for pull in program_of(plan, node).pulls
            if pull.parent == 0
        )
        assert sent <= 1.1 * m.SHARES


def test_gather_pulls_are_rotated_and_bounded() -> None:
    nodes = tuple(range(8))
    ids = (ID,) * 8
    plan = m.ExecuteReduce(7, 1, nodes, nodes, (), "any", "allgather", "", 0, ids, nodes, nodes)
    first = [program_of(plan, node).pulls[0].parent for node in nodes]
    assert first == [1, 2, 3, 4, 5, 6, 7, 0]  # no two begin at the same node
    assert all(program_of(plan, node).inbound_max == INBOUND_PARENTS_MAX for node in nodes)


@given(st.lists(plans() | spreads(), min_size=1, max_size=6), st.integers(0, 11))
def test_programs_of_equal_plans_are_cached(
    found: list[m.ExecuteReduce | m.Distribute], node: int
) -> None:
    programs = ProgramCache()
    for plan in found:
        known = programs.of(plan, node)
        assert known == program_of(plan, node)
        assert programs.of(msgspec.structs.replace(plan, operation=99, epoch=7), node) is known


def test_number_of_cached_programs_is_bounded() -> None:
    programs = ProgramCache()
    plan = m.Distribute(1, ID, 1, 8, (0,), (1, 2), tree_shapes.cut([(1, 1), (2, 1)]), "stripes")
    first = programs.of(plan, 1)
    for share in range(2, PROGRAMS_MAX + 2):
        other = msgspec.structs.replace(plan, stripes=tree_shapes.cut([(1, share), (2, 1)]))
        assert programs.of(other, 1) == program_of(other, 1) != first
    assert programs.of(plan, 1) == first
    assert programs.of(plan, 1) is not first


def test_widest_owner_may_own_several_stripes() -> None:
    assert widest(tree_shapes.cut([(0, 3), (1, 4), (0, 3)])) == round(0.6 * m.SHARES)


def test_repair_keeps_the_stripes_of_living_owners() -> None:
    before = tree_shapes.cut([(node, 1) for node in range(4)])
    after = repaired(before, {0, 1, 3})
    assert after is not None
    assert {stripe for stripe in before if stripe.owner != 2} <= set(after)
    assert tree_shapes.owners(after) == {0, 1, 3}
    moved = [stripe for stripe in after if stripe not in before]
    assert sum(stripe.end_share - stripe.begin_share for stripe in moved) == m.SHARES // 4
    assert repaired(before, set()) is None


def test_cell_of_a_member_is_created_once() -> None:
    """A fold of n members into n slices has n² of them on one node."""
    stripes = tuple(m.Stripe(1, begin, end) for begin, end in tree_shapes.halves(3))
    plan = m.ExecuteReduce(
        9, 1, (0, 1), (0, 1), stripes, "any", "reduce_scatter", "sum", 0,
        (ID,) * 2, (0, 0), (1,) * 3, (ID,) * 3,
    )  # fmt: skip
    program = program_of(plan, 0)
    folded = [cell for fold in program.folds for cell in fold.sources]
    assert len(folded) == 6
    assert {id(cell) for cell in folded} == {id(cell) for cell, _ in program.given}
