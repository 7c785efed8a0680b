"""Details of plans for copies that a scenario would say less directly."""

from __future__ import annotations

import pytest

from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import A, B, CopyCluster


def test_late_receiver_uses_the_stripes_of_its_receiving_parents() -> None:
    """Each of its stripes can then be sent while one stripe of its parent arrives."""
    cluster = CopyCluster(5)
    before = cluster.spread(1, 2, 3)
    late = cluster.fetch(4)
    assert len({stripe.owner for stripe in late.stripes}) > 1
    ends = {stripe.end_share for stripe in late.stripes}
    assert {stripe.end_share for stripe in before.stripes} <= ends


def test_empty_transfer_without_latency_takes_no_time() -> None:
    cluster = CopyCluster(2)
    cluster.speeds.measure_link(0, 1, 0.0, None, 0.0)
    plan = cluster.fetch(1, nbytes=0)
    assert (plan.nbytes, plan.receivers) == (0, (1,))


def test_small_object_is_copied_from_the_faster_holder() -> None:
    """So small that it takes less than a second from either."""
    cluster = CopyCluster(3)
    cluster.speeds.measure_host(0, 2e7, 1e8)
    cluster.speeds.measure_host(1, 1e8, 1e8)
    plan = cluster.fetch(2, nbytes=1 << 20, holders=(0, 1))
    assert {stripe.owner for stripe in plan.stripes} == {1}


def test_narrow_path_is_used_only_without_alternative() -> None:
    """Its receiver will have the object late, so it is no parent of the next one."""
    cluster = CopyCluster(4)
    for node in range(4):
        cluster.speeds.measure_host(node, 1e8, 1e8)
    for node in (1, 2):
        cluster.speeds.measure_link(0, node, None, 1e7, 0.0)
    first = cluster.fetch(1, nbytes=10**8)
    assert first.sources == (0,)
    (transfer,) = cluster.copies.entries[A].transfers.values()
    assert transfer.ends_at == pytest.approx(10.0, rel=0.01)
    assert cluster.fetch(3, nbytes=10**8).sources == (0,)
    last = cluster.fetch(2, nbytes=10**8)
    assert {stripe.owner for stripe in last.stripes} == {3}


def test_parent_on_a_narrow_path_is_not_added() -> None:
    """Node 0 still has nine tenths of its link to spare, and node 1 receives over a narrow path."""
    cluster = CopyCluster(3)
    for node in range(3):
        cluster.speeds.measure_host(node, 1e8, 1e8)
    cluster.speeds.measure_link(0, 1, None, 1.2e7, 0.0)
    cluster.fetch(1, nbytes=10**8)
    plan = cluster.fetch(2, nbytes=10**8)
    assert {stripe.owner for stripe in plan.stripes} == {0}


def test_busy_holder_gets_a_fair_share_of_its_link() -> None:
    """It sends one object at its whole rate already: two of them get half of it each."""
    cluster = CopyCluster(3)
    cluster.speeds.measure_host(0, 1e8, 1e8)
    cluster.fetch(1, nbytes=10**8)
    plan = cluster.fetch(2, nbytes=10**8, object_id=B)
    (transfer,) = cluster.copies.entries[B].transfers.values()
    assert (transfer.plan, plan.sources) == (plan, (0,))
    assert transfer.ends_at == pytest.approx(2.0, rel=0.01)


def test_fair_share_of_a_busy_link_beats_a_small_spare_rate() -> None:
    """Node 0 has an eighth of its link left, node 1 nothing: of the latter's half the receiver has
    more."""
    cluster = CopyCluster(3)
    for node, busy in ((0, 0.875e8), (1, 1e8)):
        cluster.speeds.measure_host(node, 1e8, 1e8)
        cluster.copies._busy[node] = busy
    plan = cluster.fetch(2, holders=(0, 1))
    rates = {0: 0, 1: 0}
    for stripe in plan.stripes:
        rates[stripe.owner] += stripe.end_share - stripe.begin_share
    assert rates[1] > 3 * rates[0]


def test_equal_holders_serve_in_turn() -> None:
    cluster = CopyCluster(3)
    parents = []
    for _ in range(6):
        plan = cluster.fetch(2, holders=(0, 1))
        parents += [stripe.owner for stripe in plan.stripes]
        cluster.copies.complete(m.FetchComplete(2, A, plan.epoch), 0.0)
        cluster.copies.dropped(m.CopyDropped(2, A), 0.0)
    assert parents == [0, 1, 0, 1, 0, 1]


def test_only_reporting_holders_keep_the_entry() -> None:
    """Node 0 is the owner, and node 1 was only named by a request: it will not report that it has
    let its copy go."""
    cluster = CopyCluster(4)
    for node in (2, 3):
        plan = cluster.fetch(node, holders=(0, 1))
        cluster.copies.complete(m.FetchComplete(node, A, plan.epoch), 0.0)
    cluster.copies.dropped(m.CopyDropped(2, A), 0.0)
    assert set(cluster.copies.entries[A].whole) == {0, 1, 3}
    cluster.copies.dropped(m.CopyDropped(3, A), 0.0)
    assert not cluster.copies.entries


@pytest.mark.parametrize("leaving", [False, True])
def test_owners_keep_their_stripes_after_a_death_unless_they_leave(leaving: bool) -> None:
    cluster = CopyCluster(5)
    before = cluster.spread(1, 2, 3, 4)
    if leaving:
        cluster.membership.leaving.add(2)
    cluster.membership.lose(4)
    sends = cluster.copies.lose(4, 0.0)
    (after,) = {one for _, one in sends if isinstance(one, m.Distribute)}
    keeping = {1, 3} if leaving else {1, 2, 3}
    assert {stripe.owner for stripe in after.stripes} == keeping
    assert {stripe for stripe in before.stripes if stripe.owner in keeping} < set(after.stripes)


def test_stripes_are_kept_after_a_death_instead_of_packed_trees() -> None:
    """Also where links are no star: what has come came along the stripes."""
    cluster = CopyCluster(5)
    cluster.speeds.measure_link(1, 2, 1e-4, 1e7, 0.0)
    before = cluster.spread(1, 2, 3, 4)
    (asked,) = cluster.copies.trees.wanted
    assert asked.nodes == (0, 1, 2, 3, 4)
    cluster.membership.lose(4)
    after = {one for _, one in cluster.copies.lose(4, 0.0) if isinstance(one, m.Distribute)}
    assert {plan.rule for plan in after} == {"stripes"}
    assert all({*before.stripes[:3]} < {*plan.stripes} for plan in after)
    assert cluster.copies.trees.wanted == [asked]
