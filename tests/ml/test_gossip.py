"""Gossip: the mean of the ranks never changes, whatever arrives, and graphs as planned."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml
from hoplite_mp.ml import _matchings
from hoplite_mp.ml._gossip import reliability
from tests.support.group_members import in_threads

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAIRS = list(itertools.combinations(range(6), 2))


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=4, memory="128MiB") as made:
        yield made


def qualities(seed: int, size: int) -> Any:
    found = np.random.default_rng(seed).uniform(0, 1, (size, size))
    return np.minimum(found, found.T)


@given(st.integers(0, 999), st.integers(2, 9), st.floats(0, 0.9))
def test_matchings_have_each_edge_once_and_each_rank_at_most_once(
    seed: int, size: int, least: float
) -> None:
    quality = qualities(seed, size)
    found = _matchings.matchings(quality, range(size), least)
    edges = [edge for one in found for edge in one]
    assert sorted(edges) == [
        pair for pair in itertools.combinations(range(size), 2) if quality[pair] > least
    ]
    for one in found:
        ranks = [rank for edge in one for rank in edge]
        assert len(ranks) == len(set(ranks))
    degree = max((sum(rank in edge for edge in edges) for rank in range(size)), default=0)
    assert len(found) <= max(2 * degree - 1, 0)


@given(st.sets(st.sampled_from(PAIRS)))
def test_metropolis_weights_keep_the_mean(edges: set[tuple[int, int]]) -> None:
    weights = _matchings.metropolis_weights(edges, 6)
    np.testing.assert_array_equal(weights, weights.T)
    np.testing.assert_allclose(weights.sum(axis=0), 1)
    assert (weights >= 0).all()
    assert {pair for pair in PAIRS if weights[pair] > 0} == edges
    assert (np.diag(weights) > 0).all()


@given(st.sets(st.sampled_from(PAIRS)))
def test_algebraic_connectivity_is_positive_exactly_for_connected_graphs(
    edges: set[tuple[int, int]],
) -> None:
    reached, more = {0}, True
    while more:
        grown = (
            reached | {b for a, b in edges if a in reached} | {a for a, b in edges if b in reached}
        )
        more, reached = grown != reached, grown
    found = _matchings.algebraic_connectivity(_matchings.laplacian(edges, 6))
    assert (found > 0) == (len(reached) == 6)


@given(st.integers(0, 999), st.floats(0.1, 3))
@settings(max_examples=40)
def test_chosen_matchings_are_the_best_within_the_budget(seed: int, budget: float) -> None:
    rng = np.random.default_rng(seed)
    candidates = _matchings.matchings(qualities(seed, 5), range(5))
    seconds = rng.uniform(0.1, 1, len(candidates))
    recent = _matchings.laplacian([(0, 1)], 5) * 0.5
    chosen = _matchings.choose_matchings(candidates, seconds, budget, recent, range(5))
    if seconds.min() > budget:
        assert chosen == [int(seconds.argmin())]
        return
    assert sum(seconds[chosen]) <= budget

    def connectivity(subset: Any) -> float:
        edges = [edge for number in subset for edge in candidates[number]]
        return _matchings.algebraic_connectivity(recent + _matchings.laplacian(edges, 5))

    best = max(
        connectivity(subset)
        for count in range(len(candidates) + 1)
        for subset in itertools.combinations(range(len(candidates)), count)
        if sum(seconds[list(subset)]) <= budget
    )
    assert connectivity(chosen) == pytest.approx(best, abs=1e-8)


def test_many_matchings_are_added_greedily_within_the_budget() -> None:
    candidates = _matchings.matchings(np.ones((12, 12)), range(12))
    assert len(candidates) > _matchings.EXHAUSTIVE_MAX
    seconds = [1.0] * len(candidates)
    chosen = _matchings.choose_matchings(candidates, seconds, 3.5, np.zeros((12, 12)), range(12))
    assert len(chosen) == 3
    edges = [edge for number in chosen for edge in candidates[number]]
    assert _matchings.algebraic_connectivity(_matchings.laplacian(edges, 12)) > 0


def test_slow_edges_are_unreliable_until_they_are_forgotten() -> None:
    seconds = np.full((3, 3), 0.1)
    seconds[0, 1] = 4.0
    age = np.zeros((3, 3))
    _, chance = reliability(seconds, age, 1.0)
    assert chance[0, 1] == chance[1, 0] < 0.1
    assert chance[0, 2] > 0.99
    age[0, 1] = 60.0
    assert reliability(seconds, age, 1.0)[1][0, 1] > 0.5
    assert (reliability(np.full((3, 3), np.nan), np.full((3, 3), np.inf), 1.0)[1] > 0.5).all()


@pytest.mark.parametrize("topology", ["reliable", "ring", "random"])
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("deadline", [5.0, 1e-9])
def test_the_sum_of_the_ranks_stays(
    cluster: hoplite_mp.Cluster, topology: Any, size: int, deadline: float
) -> None:
    """With the short deadline, some arrays arrive in one direction only."""

    def body(group: hoplite_mp.Group) -> Any:
        gossip = ml.Gossip(group, deadline, topology)
        x, steps = np.eye(size)[group.rank], []
        for _ in range(4):
            x = gossip.mix(x)
            steps.append((x, gossip.partners_))
        return steps

    found = in_threads(cluster, f"sum-{topology}-{size}-{deadline}", size, body)
    for step in zip(*found, strict=True):
        np.testing.assert_allclose(sum(x for x, _ in step), np.ones(size))
        partners = [set(some) for _, some in step]
        assert all(a in partners[b] for a in range(size) for b in partners[a])
    if topology == "ring" and deadline > 1:
        assert found[0][0][1] == {1: (), 2: (1,), 5: (1, 4)}[size]


def test_float32_stays_float32_and_the_argument_is_not_changed(cluster: hoplite_mp.Cluster) -> None:
    def body(group: hoplite_mp.Group) -> Any:
        x = np.full((2, 3), group.rank, np.float32)
        mixed = ml.Gossip(group, 5.0).mix(x)
        assert (x == group.rank).all()
        return mixed

    for mixed in in_threads(cluster, "float32", 2, body):
        assert mixed.dtype == np.float32
        np.testing.assert_array_equal(mixed, np.full((2, 3), 0.5, np.float32))


def test_other_shapes_are_a_value_error_on_every_rank(cluster: hoplite_mp.Cluster) -> None:
    found = in_threads(
        cluster, "shapes", 2, lambda group: ml.Gossip(group).mix(np.zeros(group.rank + 1))
    )
    assert all(isinstance(one, ValueError) and "equal shapes" in str(one) for one in found)


def member(rank: int, name: str, folder: Path, topology: Any) -> Any:
    """Rank 1 is killed once, after its third round. Each rank ends when all have mixed since."""
    x, replaces = np.array([float(rank)]), (folder / "died").exists()
    if replaces:
        (folder / "replaced").touch()
    gossip = ml.Gossip(hoplite_mp.current().group(name, 3, rank), 2.0, topology)
    rounds = 0
    while len(list(folder.glob("*.done"))) < 3:
        x = gossip.mix(x)
        rounds += 1
        if rank == 1 and not replaces and rounds == 3:
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        mixed = bool(gossip.partners_) if replaces else 1 in gossip.partners_
        if mixed and (folder / "replaced").exists():
            (folder / f"{rank}.done").touch()
    return float(x[0])


@pytest.mark.parametrize("topology", ["reliable", "ring"])
def test_a_killed_rank_is_replaced_and_mixes_again(
    cluster: hoplite_mp.Cluster, tmp_path: Path, topology: Any
) -> None:
    name = f"killed-{topology}"
    members = [cluster.submit(member, rank, name, tmp_path, topology) for rank in range(3)]
    assert all(0 <= one.result(60) <= 2 for one in members)
    assert (tmp_path / "replaced").exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [((0.0,), "deadline"), ((float("inf"),), "deadline"), ((1.0, "star"), "topology")],
)
def test_bad_arguments_are_value_errors(
    cluster: hoplite_mp.Cluster, arguments: Any, text: str
) -> None:
    with cluster.group(f"bad-{text}-{arguments}", 1) as group:
        with pytest.raises(ValueError, match=text):
            ml.Gossip(group, *arguments)
        with pytest.raises(ValueError, match="floats"):
            ml.Gossip(group).mix(np.arange(3))
