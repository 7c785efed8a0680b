"""Allreduces by trees on interconnects, against what the rules of links and steps allow."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._simulation.interconnects.interconnect import HOSTS_MAX, Interconnect, interconnect
from hoplite_mp._simulation.interconnects.multitree import multitree
from hoplite_mp._simulation.interconnects.packed_trees import packed_trees
from hoplite_mp._simulation.interconnects.tree_schedules import (
    PLANS,
    Send,
    TreeSchedule,
    schedule_of,
)

NBYTES, RATE, LATENCY_S = 64 << 20, 125e6, 100e-6

sides = st.integers(1, 5)
grids = st.builds("{}:{}x{}".format, st.sampled_from(["torus", "mesh"]), sides, sides)
names = st.one_of(
    grids.filter(lambda name: not name.endswith(":1x1")),
    st.builds("star:{}".format, st.integers(2, 17)),
    st.sampled_from(["fattree:4", "fattree:9", "fattree:16", "fattree:25"]),
)
networks = names.map(interconnect)
few = settings(max_examples=40, deadline=None)


def possible(plan: str, network: Interconnect) -> bool:
    return plan != "halving" or network.hosts & (network.hosts - 1) == 0


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Interconnect, TreeSchedule]:
    network = draw(networks)
    plans = [plan for plan in PLANS if possible(plan, network)]
    schedule = schedule_of(draw(st.sampled_from(plans)), network)
    if schedule.pipelined:
        schedule = TreeSchedule(schedule.trees, draw(st.integers(1, 6)), pipelined=True)
    return network, schedule


def messages(schedule: TreeSchedule) -> dict[int, list[tuple[tuple[int, int], Send]]]:
    """((tree, block), send) of each step of the distribution."""
    found: dict[int, list[tuple[tuple[int, int], Send]]] = {}
    for number, tree in enumerate(schedule.trees):
        for send in tree:
            for block in range(schedule.blocks):
                found.setdefault(send.step + block, []).append(((number, block), send))
    return dict(sorted(found.items()))


def played(hosts: int, schedule: TreeSchedule) -> dict[tuple[int, int], list[Counter[int]]]:
    """What each host has of each block after the allreduce: how often each host's data counts.
    A step's messages carry what their senders had before the step."""
    keys = [(n, b) for n in range(len(schedule.trees)) for b in range(schedule.blocks)]
    has = {key: [Counter([host]) for host in range(hosts)] for key in keys}
    steps = list(messages(schedule).values())
    for step in reversed(steps):
        before = {key: [one.copy() for one in has[key]] for key, _ in step}
        for key, send in step:
            has[key][send.path[0]].update(before[key][send.path[-1]])
    for step in steps:
        before = {key: [one.copy() for one in has[key]] for key, _ in step}
        for key, send in step:
            has[key][send.path[-1]] = before[key][send.path[0]]
    return has


# ---- interconnects


@few
@given(networks)
def test_interconnect_links_connect_both_ways_and_routes_follow_links(
    network: Interconnect,
) -> None:
    links = set(network.links)
    assert len(links) == len(network.links)
    assert links == {(receiver, sender) for sender, receiver in links}
    assert sorted(network.ring) == list(range(network.hosts))
    for sender in range(network.hosts):
        distances = {sender: 0}
        queue = [sender]
        for here in queue:
            for other in network.neighbours()[here]:
                if other not in distances:
                    distances[other] = distances[here] + 1
                    queue.append(other)
        for receiver in set(range(network.hosts)) - {sender}:
            path = network.route(sender, receiver)
            assert (path[0], path[-1]) == (sender, receiver)
            assert links.issuperset(pairwise(path))
            assert len(path) - 1 == distances[receiver]


@pytest.mark.parametrize("name", ["torus:8x8", "mesh:8x8", "mesh:3x4", "torus:4x3", "mesh:2x2"])
def test_ring_of_an_even_grid_uses_neighbours(name: str) -> None:
    network = interconnect(name)
    assert set(network.links).issuperset(pairwise((*network.ring, network.ring[0])))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("ring:8", "none of torus:8x8"),
        ("torus:8", "none of torus:8x8"),
        ("star:1", "has 1 hosts"),
        ("mesh:1x1", "has 1 hosts"),
        (f"star:{HOSTS_MAX + 1}", f"2 to {HOSTS_MAX} are possible"),
        ("fattree:8", "a square number"),
    ],
)
def test_interconnect_of_a_wrong_name_raises_value_error(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        interconnect(name)


# ---- every plan


@few
@given(schedules())
def test_every_tree_spans_all_hosts(case: tuple[Interconnect, TreeSchedule]) -> None:
    network, schedule = case
    for tree in schedule.trees:
        root = tree[0].path[0]
        received = [send.path[-1] for send in tree]
        assert sorted([root, *received]) == list(range(network.hosts))


@few
@given(schedules())
def test_hosts_send_what_they_received_in_earlier_steps(
    case: tuple[Interconnect, TreeSchedule],
) -> None:
    _, schedule = case
    for tree in schedule.trees:
        since = {tree[0].path[0]: -1}
        since |= {send.path[-1]: send.step for send in tree}
        assert all(since[send.path[0]] < send.step for send in tree)


@few
@given(schedules())
def test_messages_follow_the_links(case: tuple[Interconnect, TreeSchedule]) -> None:
    network, schedule = case
    links = set(network.links)
    for tree in schedule.trees:
        assert all(links.issuperset(pairwise(send.path)) for send in tree)


@few
@given(schedules())
def test_allreduce_brings_each_hosts_data_to_all_hosts_once(
    case: tuple[Interconnect, TreeSchedule],
) -> None:
    network, schedule = case
    everything = Counter(range(network.hosts))
    for hosts in played(network.hosts, schedule).values():
        assert hosts == [everything] * network.hosts


@few
@given(schedules())
def test_loads_are_those_of_the_busiest_link_of_each_step(
    case: tuple[Interconnect, TreeSchedule],
) -> None:
    _, schedule = case
    loads = []
    for step in messages(schedule).values():
        loads.append(max(Counter(hop for _, send in step for hop in pairwise(send.path)).values()))
    assert schedule.loads() == loads
    assert schedule.steps == 2 * len(loads)
    block_s = NBYTES / len(schedule.trees) / schedule.blocks / RATE
    seconds = 2 * (LATENCY_S * len(loads) + block_s * sum(loads))
    assert schedule.seconds(NBYTES, RATE, LATENCY_S) == pytest.approx(seconds)


@few
@given(networks)
def test_no_plan_is_faster_than_the_links_of_a_host(network: Interconnect) -> None:
    """Each host must receive all data, over its links."""
    receiving = Counter(receiver for _, receiver in network.links)
    least = NBYTES / RATE / min(receiving[host] for host in range(network.hosts))
    for plan in PLANS:
        if possible(plan, network):
            schedule = schedule_of(plan, network).with_best_blocks(NBYTES, RATE, LATENCY_S)
            assert schedule.seconds(NBYTES, RATE, LATENCY_S) > least


# ---- MultiTree and packed trees


@few
@given(networks)
def test_multitree_uses_no_link_twice_in_a_step(network: Interconnect) -> None:
    used = Counter(
        (step, hop) for tree in multitree(network) for step, path in tree for hop in pairwise(path)
    )
    assert max(used.values()) == 1


@few
@given(networks)
def test_packed_trees_share_no_link_and_are_as_many_as_the_roots_smallest_cut(
    network: Interconnect,
) -> None:
    trees = packed_trees(network)
    used = Counter(hop for tree in trees for _, path in tree for hop in pairwise(path))
    assert max(used.values()) == 1
    hosts = range(network.hosts)
    links = Counter(receiver for _, receiver in network.links if receiver in hosts)
    links[0] = Counter(sender for sender, _ in network.links)[0]
    # In these networks no cut is smaller than that around a single host.
    assert len(trees) == min(links.values())


def test_halving_on_another_number_of_hosts_raises_value_error() -> None:
    with pytest.raises(ValueError, match="halving needs a power of two of hosts"):
        schedule_of("halving", interconnect("star:6"))


# ---- figures


def speed(name: str, plan: str, over: str) -> float:
    network = interconnect(name)
    seconds = [
        schedule_of(one, network).with_best_blocks(NBYTES, RATE, 0).seconds(NBYTES, RATE, 0)
        for one in (over, plan)
    ]
    return seconds[0] / seconds[1]


def test_multitree_on_a_torus_is_faster_than_rings() -> None:
    assert schedule_of("multitree", interconnect("torus:8x8")).steps == 34
    assert speed("torus:8x8", "multitree", "ring") == pytest.approx(63 / 17)
    assert speed("torus:8x8", "multitree", "two-way-ring") == pytest.approx(31.5 / 17)


@pytest.mark.parametrize("hosts", [2, 5, 8, 16])
def test_multitree_on_a_star_is_as_fast_as_a_ring(hosts: int) -> None:
    assert speed(f"star:{hosts}", "multitree", "ring") == 1


def test_star_without_latency_needs_the_same_time_for_plans_with_many_trees() -> None:
    for plan in ("two-way-ring", "halving"):
        assert speed("star:16", plan, "ring") == pytest.approx(1)
    assert speed("star:16", "twotree", "ring") == pytest.approx(15 / 16, rel=0.01)
