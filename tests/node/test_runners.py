"""The choice of a runner is that of a search through all of them, and costs a few steps."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.tasks.outbound_tasks import OneRunner, Runner, Runners

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MANY = 1_000
TASKS = 5_000
VISITS_MAX = 12  # for each task: stale entries, and now and then all entries of a heap


class Searched:
    """What `Runners` promises, by a search."""

    def __init__(self, runners: Iterable[Runner]) -> None:
        self.runners = list(runners)

    def suitable(self, idle: bool) -> list[Runner]:
        free = [one for one in self.runners if one.free]
        return free if free or idle else [one for one in self.runners if one.capacity > 0]

    def best(self, suitable: list[Runner], near: Mapping[int, int]) -> Runner:
        return max(suitable, key=lambda r: (near.get(r.number, 0), r.capacity, -r.ended))


@pytest.mark.parametrize("seed", range(30))
def test_chosen_runner_equals_a_full_search(seed: int) -> None:
    chance = random.Random(seed)
    runners, searched = Runners(), Searched(())
    ends = task = 0
    for _ in range(400):
        what = chance.random()
        if what < 0.1 and len(searched.runners) < 8:
            number = chance.randrange(5)
            runner = Runner(task, number, chance.randrange(4), ahead=chance.choice((0, 2, 2)))
            runners.add(runner)
            searched.runners.append(runner)
        elif what < 0.13 and searched.runners:
            gone = chance.choice(searched.runners)
            searched.runners.remove(gone)
            runners.remove(gone)
            gone.workers += 1  # what happens to it later does not count
            gone.changed()
        elif what < 0.2 and searched.runners:
            changed = chance.choice(searched.runners)
            changed.workers = chance.randrange(4)
            changed.changed()
        elif what < 0.5 and (busy := [one for one in searched.runners if one.running]):
            ended = chance.choice(busy)
            ended.running.popitem()
            ends += 1
            ended.ended = ends
            ended.changed()
        else:
            idle = chance.random() < 0.3
            near = {n: chance.randrange(3) for n in range(5) if chance.random() < 0.3}
            suitable = searched.suitable(idle)
            found = runners.suitable(lambda idle=idle: idle)
            assert (found is None) == (not suitable)
            if found is not None:
                best = runners.best(found, near)
                assert best is searched.best(suitable, near)
                task += 1
                best.running[task] = []
                best.changed()
        assert runners.free == sum(one.free for one in searched.runners)
        crowded = {one for one in searched.runners if len(one.running) > one.workers}
        assert set(runners.crowded) == crowded
        assert len(runners) == len(searched.runners)


def test_choice_among_many_runners_visits_few() -> None:
    runners = Runners()
    some = [Runner(n, n, 4) for n in range(MANY)]
    for one in some:
        runners.add(one)
    runners.visits = 0
    for task in range(TASKS):
        heap = runners.suitable(lambda: False)
        assert heap is not None
        best = runners.best(heap, {})
        best.running[task] = []
        best.changed()
        if task % 2:  # as many again end elsewhere
            ended = some[task % MANY]
            if ended.running:
                ended.running.popitem()
                ended.ended = task
                ended.changed()
    assert runners.visits <= VISITS_MAX * TASKS


def test_runner_of_a_bound_pool_is_chosen_while_it_has_capacity() -> None:
    runner = Runner(1, 1, 1, ahead=1)
    bound = OneRunner(runner)
    for idle in (True, False):
        assert bound.suitable(lambda idle=idle: idle) is not None
    runner.running[1] = []
    assert bound.suitable(lambda: True) is None
    heap = bound.suitable(lambda: False)
    assert heap is not None
    assert bound.best(heap, {}) is runner
    runner.running[2] = []
    assert bound.suitable(lambda: False) is None
