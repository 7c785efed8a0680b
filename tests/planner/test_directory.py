"""A death visits the objects that name the node, and no others."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._planner.program import participants
from hoplite_mp._protocol import messages as m
from tests.support.planner_clusters import NBYTES, CopyCluster

if TYPE_CHECKING:
    from hoplite_mp._planner.directory import DirectoryEntry

OBJECTS = 2_000
NODES = 6


def object_id(number: int) -> bytes:
    """Of an object that node 0 owns."""
    return (700).to_bytes(8, "little") + (number + 1).to_bytes(8, "little")


def hold(cluster: CopyCluster, node: int, number: int) -> None:
    """Makes the node a reported holder of that object."""
    plan = cluster.fetch(node, object_id=object_id(number))
    cluster.copies.complete(m.FetchComplete(node, plan.object, plan.epoch), 0.0)


def test_death_visits_only_objects_that_name_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = CopyCluster(NODES)
    for number in range(OBJECTS):
        hold(cluster, 1, number)
    for number in range(3):
        hold(cluster, 2, number)
    visited: list[bytes] = []
    strike = cluster.copies._strike

    def count(entry: DirectoryEntry, node: int, now: float) -> list[object]:
        visited.append(entry.object)
        return strike(entry, node, now)  # type: ignore[return-value]

    monkeypatch.setattr(cluster.copies, "_strike", count)
    for node, expected in ((5, 0), (2, 3), (1, OBJECTS)):
        visited.clear()
        cluster.membership.lose(node)
        cluster.copies.lose(node, 0.0)
        assert len(visited) == expected
    assert not cluster.copies.entries
    assert not cluster.copies._directory.named


@pytest.mark.parametrize("seed", range(20))
def test_index_has_every_node_that_an_entry_names(seed: int) -> None:
    chance = random.Random(seed)
    cluster = CopyCluster(NODES)
    copies, directory = cluster.copies, cluster.copies._directory
    for _ in range(150):
        node, number = chance.randrange(NODES), chance.randrange(8)
        one, what = object_id(number), chance.random()
        entry = copies.entries.get(one)
        if not cluster.membership.is_living(node):
            continue
        if what < 0.4:
            holders = tuple(chance.sample(range(NODES), 2))
            copies.fetch(m.FetchRequested(node, one, NBYTES, holders), 0.0)
        elif what < 0.5:
            copies.spread(one, NBYTES, (0,), tuple(range(1, 4)), 0.0)
        elif what < 0.8 and entry is not None and node in entry.receiving:
            epoch = entry.receiving[node]
            if chance.random() < 0.7:
                copies.complete(m.FetchComplete(node, one, epoch), 0.0)
            else:
                copies.failed(m.FetchFailed(node, one, epoch, 0, "cut"), 0.0)
        elif what < 0.9:
            copies.dropped(m.CopyDropped(node, one), 0.0)
        elif what < 0.93:
            copies.gone(m.ObjectDeleted(one))
        elif what < 0.95 and len(cluster.membership.nodes) > 3:
            cluster.membership.lose(node)
            copies.lose(node, 0.0)
            assert node not in directory.named
        check(cluster)


def check(cluster: CopyCluster) -> None:
    copies, directory = cluster.copies, cluster.copies._directory
    for entry in copies.entries.values():
        named = {*entry.whole, *entry.receiving, *entry.served}
        named |= {node for pair in entry.failed for node in pair}
        for transfer in entry.transfers.values():
            named |= {*participants(transfer.plan), *transfer.waiting, *transfer.rates}
        living = set(cluster.membership.living(named))
        assert living <= entry.nodes
    index = {(node, one) for node, some in directory.named.items() for one in some}
    assert index == {(node, e.object) for e in copies.entries.values() for node in e.nodes}
