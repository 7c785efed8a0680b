"""Plans against the limits of a star network: closed forms, and the flows of real plans.

The flows are taken from the programs that nodes derive, never from the stripe plan's own sums. A
flow is told from what it needs (a stripe's second hop from its first), and every flow gets the rate
(its bytes / T): if no link is asked for more than it has, and no flow for more than what feeds
it, then all ends at T, pipelined. That is the fluid model of cut-through forwarding.
"""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from hoplite_mp._planner import cost, tree_shapes
from hoplite_mp._planner.link_speeds import (
    BYTES_PER_S_DEFAULT,
    HALF_LIFE_REPORTS,
    HostRates,
    LinkSpeeds,
)
from hoplite_mp._planner.packing import STREAMS, PackingWanted, arborescence, pack
from hoplite_mp._planner.program import program_of
from hoplite_mp._protocol import messages as m
from tests.support.planner_edges import programs_of

ID = bytes(16)
NBYTES = 1 << 26


def star(rng: random.Random, nodes: int, equal: bool) -> LinkSpeeds:
    speeds = LinkSpeeds()
    for node in range(nodes):
        up = 1e8 if equal else rng.uniform(1e7, 1e9)
        down = 1e8 if equal else rng.choice([up, rng.uniform(1e7, 1e9)])
        speeds.measure_host(node, up, down)
    return speeds


def finishing_s(plan: m.Distribute | m.ExecuteReduce, speeds: LinkSpeeds) -> float:
    """The T at which the busiest direction of the busiest host is just not overdone."""
    up: dict[int, float] = defaultdict(float)
    down: dict[int, float] = defaultdict(float)
    programs = programs_of(plan)
    for node, program in programs.items():
        for pull in program.pulls:
            width = (pull.end_share - pull.begin_share) / m.SHARES * NBYTES
            up[pull.parent] += width
            down[node] += width
            # What feeds this flow carries the same range at the same rate, or is there already.
            for fold in programs[pull.parent].folds:
                if fold.cell == pull.cell:
                    for source in fold.sources:
                        if source.node != pull.parent:
                            fed = next(p for p in programs[pull.parent].pulls if p.cell == source)
                            assert (fed.begin_share, fed.end_share) == (
                                pull.begin_share,
                                pull.end_share,
                            )
    busiest = 0.0
    for node in programs:
        (host,) = speeds.hosts((node,))
        busiest = max(busiest, up[node] / host.up, down[node] / host.down)
    return busiest


def broadcast_bound(speeds: LinkSpeeds, nodes: int) -> float:
    source, *others = speeds.hosts(range(nodes))
    total_up = source.up + sum(host.up for host in others)
    slowest = min(host.down for host in others)
    return max(NBYTES / source.up, NBYTES / slowest, (nodes - 1) * NBYTES / total_up)


def reduce_bound(speeds: LinkSpeeds, nodes: int) -> float:
    root, *others = speeds.hosts(range(nodes))
    total_down = root.down + sum(host.down for host in others)
    slowest = min(host.up for host in others)
    return max(NBYTES / root.down, NBYTES / slowest, (nodes - 1) * NBYTES / total_down)


def allreduce_bound(speeds: LinkSpeeds, nodes: int) -> float:
    both = [min(host) for host in speeds.hosts(range(nodes))]
    return NBYTES * max(1 / min(both), 2 * (nodes - 1) / sum(both))


def broadcast_plan(speeds: LinkSpeeds, nodes: int) -> m.Distribute:
    receivers = tuple(range(1, nodes))
    best = tree_shapes.spread(NBYTES, 0, receivers, speeds)
    return m.Distribute(1 << 63, ID, 1, NBYTES, (0,), receivers, best.stripes, best.shape)


def fold_plan(kind: str, speeds: LinkSpeeds, nodes: int, to: tuple[int, ...]) -> m.ExecuteReduce:
    members = tuple(range(nodes))
    best = tree_shapes.reduction(kind, NBYTES, dict.fromkeys(members, 1), to, speeds)
    return m.ExecuteReduce(
        7, 1, members, members, best.stripes, "any", kind, "sum", 0, (ID,) * nodes, members, to,
        shape=best.shape,
    )  # fmt: skip


STARS = [(seed, 2 + seed % 7) for seed in range(200)]


def test_random_stars_reach_their_bounds() -> None:
    worst = dict.fromkeys(("broadcast", "reduce", "allreduce"), 0.0)
    for seed, nodes in STARS:
        speeds = star(random.Random(seed), nodes, equal=False)
        everybody = tuple(range(nodes))
        plans = {
            "broadcast": (broadcast_plan(speeds, nodes), broadcast_bound(speeds, nodes)),
            "reduce": (
                fold_plan("reduce", speeds, nodes, (0,)),
                reduce_bound(speeds, nodes),
            ),
        }
        hosts = speeds.hosts(everybody)
        if all(host.up == host.down for host in hosts):
            plans["allreduce"] = (
                fold_plan("allreduce", speeds, nodes, everybody),
                allreduce_bound(speeds, nodes),
            )
        for kind, (plan, bound) in plans.items():
            worst[kind] = max(worst[kind], finishing_s(plan, speeds) / bound)
    assert all(ratio <= 1.05 for ratio in worst.values()), worst


@pytest.mark.parametrize("nodes", range(2, 9))
def test_allreduce_on_unequal_stars_of_equal_directions(nodes: int) -> None:
    rng = random.Random(nodes)
    for _ in range(50):
        speeds = LinkSpeeds()
        for node in range(nodes):
            rate = rng.uniform(1e7, 1e9)
            speeds.measure_host(node, rate, rate)
        plan = fold_plan("allreduce", speeds, nodes, tuple(range(nodes)))
        assert finishing_s(plan, speeds) <= 1.001 * allreduce_bound(speeds, nodes)


@pytest.mark.parametrize("nodes", range(2, 9))
def test_equal_links_reach_the_bound(nodes: int) -> None:
    speeds = star(random.Random(0), nodes, equal=True)
    everybody = tuple(range(nodes))
    exactly = pytest.approx
    broadcast = finishing_s(broadcast_plan(speeds, nodes), speeds)
    assert broadcast == exactly(NBYTES / 1e8, rel=1e-4)
    reduction = finishing_s(fold_plan("reduce", speeds, nodes, (0,)), speeds)
    assert reduction == exactly(NBYTES / 1e8, rel=1e-4)
    allreduce = finishing_s(fold_plan("allreduce", speeds, nodes, everybody), speeds)
    assert allreduce == exactly(2 * (nodes - 1) / nodes * NBYTES / 1e8, rel=1e-4)
    scatter = finishing_s(fold_plan("reduce_scatter", speeds, nodes, everybody), speeds)
    assert scatter == exactly((nodes - 1) / nodes * NBYTES / 1e8, rel=1e-4)


def test_allreduce_with_one_slow_link_reaches_the_bound() -> None:
    """Links of 1, 1, 1 and 0.25 Gbit/s: a ring would need 3.4 s, the bound is 2.1 s."""
    speeds = LinkSpeeds()
    for node, rate in enumerate([1.25e8, 1.25e8, 1.25e8, 0.3125e8]):
        speeds.measure_host(node, rate, rate)
    plan = fold_plan("allreduce", speeds, 4, (0, 1, 2, 3))
    assert finishing_s(plan, speeds) == pytest.approx(NBYTES / 0.3125e8, rel=1e-3)


def test_shares_of_equal_links_match_the_closed_form() -> None:
    rng = random.Random(1)
    for _ in range(100):
        count = rng.randint(2, 8)
        hosts = [HostRates(rate, rate) for rate in (rng.uniform(1e7, 1e9) for _ in range(count))]
        closed, _ = cost.allreduce(NBYTES, hosts)
        general, shares = cost.folding(NBYTES, hosts, [1] * count, [True] * count, [True] * count)
        assert general == pytest.approx(closed, rel=1e-4)
        assert sum(shares) == pytest.approx(1)


def test_shares_of_a_fold_with_separate_members_are_optimal() -> None:
    """Host 0 sends one member, host 2 two, and host 1, which is as slow as host 2, has the result.
    With half of it folded by host 2 itself, 1.5 times the object crosses the slow links."""
    hosts = [HostRates(4e8, 4e8), HostRates(1e8, 1e8), HostRates(1e8, 1e8)]
    wanted = [False, True, False]
    seconds, shares = cost.folding(10**8, hosts, [1, 0, 2], wanted, [True] * 3)
    assert seconds <= 1.5001
    assert seconds == cost.folding_s(10**8, hosts, [1, 0, 2], wanted, shares)


def test_broadcast_without_receivers_has_no_transfer() -> None:
    """Of a Group whose members are all on one host."""
    assert cost.broadcast(NBYTES, 1e8, []) == (0.0, 0.0, [])


def test_tree_model_of_21_receivers_has_depth_3() -> None:
    """A root, 4 below it and so on: with 21 others it is 3 deep. Each node sends to 4 children."""
    children = 4 * cost.STREAM_S
    assert cost.tree_s(21, 4, 0, 1e8, 1e-3) == pytest.approx(3 * (1e-3 + children))
    nbytes = 10**8
    block_s = cost.BLOCK_BYTES_MAX / 1e8
    setup_s = 3 * (1e-3 + children + 4 * block_s)
    assert cost.tree_s(21, 4, nbytes, 1e8, 1e-3) == pytest.approx(setup_s + 4 * nbytes / 1e8)
    both = cost.tree_s(21, 4, nbytes, 1e8, 1e-3, both_ways=True)
    assert both == pytest.approx(2 * setup_s + 5 * nbytes / 1e8)


def test_single_owner_receives_from_all_others() -> None:
    hosts = [HostRates(1e8, 2e7)] * 4
    shares = [1.0, 0.0, 0.0, 0.0]
    wanted = [True, False, False, False]
    assert cost.folding_s(10**8, hosts, [1] * 4, wanted, shares) == pytest.approx(3 * 5.0)
    # Of two members on its own host none has to travel.
    assert cost.folding_s(10**8, hosts, [2, 1, 1, 1], wanted, shares) == pytest.approx(3 * 5.0)
    # With others that want the result it sends that to each of them.
    everybody = [True] * 4
    fast = [HostRates(1e8, 1e9)] * 4
    assert cost.folding_s(10**8, fast, [1] * 4, everybody, shares) == pytest.approx(3.0)


def test_small_objects_and_many_nodes_get_few_streams() -> None:
    speeds = LinkSpeeds()
    small = tree_shapes.spread(1024, 0, range(1, 4), speeds)
    assert small.stripes == tree_shapes.single_vertex(0)
    many = tree_shapes.spread(1 << 20, 0, range(1, 1000), speeds)
    assert many.shape.startswith("tree:")
    assert "ms" in many.why
    large = tree_shapes.spread(1 << 28, 0, range(1, 9), speeds)
    assert large.shape == "stripes"
    assert len(large.stripes) == 8


def test_small_object_is_owned_by_early_arrivals() -> None:
    sent = dict.fromkeys((5, 2, 7, 1), 1)  # in order of arrival
    nbytes = 2 * tree_shapes.STRIPE_BYTES_MIN
    best = tree_shapes.reduction("allreduce", nbytes, sent, (1, 2, 5, 7), LinkSpeeds())
    assert tree_shapes.owners(best.stripes) <= {5, 2}


def test_leaving_nodes_own_nothing() -> None:
    sent = dict.fromkeys(range(4), 1)
    for to in ((0,), (0, 1, 2, 3)):
        kind = "reduce" if len(to) == 1 else "allreduce"
        best = tree_shapes.reduction(kind, NBYTES, sent, to, LinkSpeeds(), leaving={3})
        assert 3 not in tree_shapes.owners(best.stripes)
    best = tree_shapes.spread(NBYTES, 0, (1, 2, 3), LinkSpeeds(), {3})
    assert 3 not in tree_shapes.owners(best.stripes)


def test_object_of_three_stripes_has_three_owners() -> None:
    """The source has most to send: it owns one, and two of its receivers the others."""
    speeds = LinkSpeeds()
    speeds.measure_host(0, 1e9, 1e9)
    for node in range(1, 5):
        speeds.measure_host(node, 1e8, 1e9)
    best = tree_shapes.spread(3 * tree_shapes.STRIPE_BYTES_MIN, 0, range(1, 5), speeds)
    assert best.shape == "stripes"
    assert tree_shapes.owners(best.stripes) == {0, 1, 2}


def test_results_are_sent_by_owners_only() -> None:
    """Three contributions travel, and the results of two owners: that many streams are counted."""
    speeds = LinkSpeeds()
    hosts = speeds.hosts(range(3))
    sent = dict.fromkeys(range(3), 1)
    best = tree_shapes.reduction("allreduce", NBYTES, sent, (0, 1, 2), speeds, leaving={2})
    transfer_s = cost.folding_s(NBYTES, hosts, [1] * 3, [True] * 3, [0.5, 0.5, 0.0])
    latency_s = speeds.latency_s(range(3))
    assert best.seconds == pytest.approx(cost.one_hop_s(transfer_s, 3 + 2, latency_s), rel=1e-7)


def test_reproducible_reduction_notes_its_cost() -> None:
    sent = {0: 4, 1: 4}
    plain = tree_shapes.reduction("allreduce", NBYTES, sent, (0, 1), LinkSpeeds())
    ordered = tree_shapes.reduction("allreduce", NBYTES, sent, (0, 1), LinkSpeeds(), ordered=True)
    assert ordered.seconds > 2 * plain.seconds
    assert "one by one" in ordered.why


def test_latencies_are_smoothed_with_the_stated_half_life() -> None:
    speeds = LinkSpeeds()
    speeds.measure_link(0, 1, 1e-3, None, 0.0)
    for _ in range(HALF_LIFE_REPORTS):
        speeds.measure_link(0, 1, 2e-3, None, 0.0)
    assert speeds.pair_latency_s(0, 1) == pytest.approx(1.5e-3)
    assert speeds.latency_s((0, 2)) == pytest.approx(1.5e-3)


def test_latest_reported_rates_are_used() -> None:
    """A node smooths them, and reports changes alone: nothing more comes of a rate that stays."""
    speeds = LinkSpeeds()
    speeds.measure_host(0, 1e8, 1e8)
    speeds.measure_host(0, 2e8, None)
    assert speeds.hosts((0,))[0] == (2e8, 1e8)
    # Who has not been measured is taken to be like the others.
    assert speeds.hosts((1,))[0] == (2e8, 1e8)
    speeds.lose(0)
    assert speeds.hosts((0,))[0] == (BYTES_PER_S_DEFAULT, BYTES_PER_S_DEFAULT)


def test_topology_of_two_switches_is_not_a_star() -> None:
    speeds = two_switches()
    assert not speeds.is_star(range(4), 0.0)
    assert speeds.is_star((0, 1), 0.0)


def two_switches() -> LinkSpeeds:
    """Nodes 0 and 1 on one switch, 2 and 3 on the other, a tenth of the rate between them."""
    speeds = LinkSpeeds()
    for node in range(4):
        speeds.measure_host(node, 1e8, 1e8)
        for peer in range(4):
            if node // 2 != peer // 2:
                speeds.measure_link(node, peer, 1e-4, 1e7, 0.0)
    return speeds


def test_packed_trees_reach_most_of_the_best_rate() -> None:
    wanted = PackingWanted.between((0, 1, 2, 3), two_switches(), 0.0)
    packed = pack(wanted)
    # Each of four pairs across carries 1e7, and each byte must cross once.
    assert packed.rate >= 0.8 * 4e7
    use: dict[tuple[int, int], float] = defaultdict(float)
    for weight, parents in packed.trees:
        for child, parent in enumerate(parents, 1):
            use[parent, wanted.nodes[child]] += weight
    for i, j, rate in wanted.pairs:
        assert use[i, j] <= 1.001 * rate
    stripes = tree_shapes.cut([(0, weight) for weight, _ in packed.trees])
    rows = tuple(parents for _, parents in packed.trees)[: len(stripes)]
    plan = m.Distribute(1 << 63, ID, 1, NBYTES, (0,), (1, 2, 3), stripes, "parents", rows)
    assert {pull.parent for pull in program_of(plan, 3).pulls} <= {0, 1, 2}


def test_packed_trees_do_not_exceed_the_slowest_receiver() -> None:
    wanted = PackingWanted((0, 1, 2), up=(1e8, 1e8, 1e8), down=(1e8, 1e7, 1e8), pairs=())
    assert 0.8e7 <= pack(wanted).rate <= 1.001e7


def test_streams_of_packed_trees_are_nearly_equal() -> None:
    links = PackingWanted((0, 1, 2), (1e7,) * 3, (1e7,) * 3, ((0, 1, 1e6), (0, 2, 4e6)))
    packed = pack(links)
    streams = packed.streams()
    assert len(packed.trees) < len(streams) < 2 * STREAMS
    for weight, parents in packed.trees:
        parts = [part for part, row in streams if row == parents]
        assert sum(parts) == pytest.approx(weight)
        assert max(parts) <= 1.5 * packed.rate / STREAMS


def test_packed_trees_keep_the_heaviest() -> None:
    """Of the root's two edges one is ten times as fast: hardly anything goes along the other."""
    wanted = PackingWanted((0, 1, 2), (1e8,) * 3, (1e8,) * 3, pairs=((0, 1, 1e8), (0, 2, 2e6)))
    packed = pack(wanted)
    assert [parents for _, parents in packed.trees] == [(0, 1)]
    across = PackingWanted.between(range(4), two_switches(), 0.0)
    weights = [weight for weight, _ in pack(across).trees]
    assert weights == sorted(weights, reverse=True)


def test_arborescences_match_exhaustive_search() -> None:
    """Every assignment of parents is tried: five vertices have few."""
    rng = random.Random(2)
    for _ in range(60):
        count = rng.randint(2, 5)
        lengths = {(i, j): rng.random() for i in range(count) for j in range(1, count) if i != j}
        parents = arborescence(count, lengths)
        found = sum(lengths[parent, child] for child, parent in enumerate(parents, 1))
        assert found == pytest.approx(shortest_by_trying(count, lengths))


def test_arborescence_with_an_unreachable_vertex_is_none() -> None:
    with pytest.raises(ValueError, match="2 vertices have no edge"):
        arborescence(4, {(0, 1): 1.0})


def shortest_by_trying(count: int, lengths: dict[tuple[int, int], float]) -> float:
    def reaches_root(parents: list[int], vertex: int) -> bool:
        for _ in range(count):
            if vertex == 0:
                return True
            vertex = parents[vertex - 1]
        return False

    best = float("inf")
    for number in range(count ** (count - 1)):
        parents = [number // count**place % count for place in range(count - 1)]
        if any(parent == child for child, parent in enumerate(parents, 1)):
            continue
        if all(reaches_root(parents, vertex) for vertex in range(1, count)):
            best = min(best, sum(lengths[p, c] for c, p in enumerate(parents, 1)))
    return best
