"""Calls of one process run in the order in which they were made, whatever they wait for."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import hoplite_mp
from tests.support.functions import Counter
from tests.support.waiting import wait_for

MORE_THAN_A_RING = 5000  # hints of one process to one pool


def _later(value: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return value


def _note_many(handle: Any, who: str, count: int) -> None:
    for i in range(count):
        handle.note((who, i))


def test_a_call_with_a_pending_argument_holds_back_the_later_ones(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    slow = c.submit(_later, "slow", 0.1)
    counter.note(slow)
    for i in range(5):
        counter.note(i)
    assert counter.notes().result(20) == ["slow", 0, 1, 2, 3, 4]


def test_a_failed_argument_fails_that_call_alone(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    counter.note(0)
    failed = counter.note(c.submit(int, "no number"))
    counter.note(1)
    assert counter.notes().result(20) == [0, 1]
    assert isinstance(failed.exception(20), ValueError)


def test_a_call_cancelled_while_it_holds_back_others(c: hoplite_mp.Cluster, tmp_path: Path) -> None:
    counter = c.actor(Counter)
    held = counter.note(c.submit(wait_for, tmp_path / "go"))
    counter.note(1)
    assert held.cancel()
    assert counter.notes().result(20) == [1]
    (tmp_path / "go").touch()


def test_more_calls_than_a_queue_holds(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    counter.wait(0.2)
    for i in range(MORE_THAN_A_RING):
        counter.note(i)
    assert counter.notes().result(60) == list(range(MORE_THAN_A_RING))


def test_several_processes_each_in_its_order(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    done = [c.submit(_note_many, counter, who, 200) for who in "abcd"]
    _note_many(counter, "driver", 200)
    for one in done:
        one.result(30)
    seen = counter.notes().result(20)
    for who in (*"abcd", "driver"):
        assert [i for name, i in seen if name == who] == list(range(200))


def test_random_arguments_from_several_threads(c: hoplite_mp.Cluster) -> None:
    """Each thread's calls in its order, with ready, pending and failing arguments mixed."""
    counter = c.actor(Counter)
    expected: dict[int, list[int]] = {}

    def run(number: int) -> None:
        chance = random.Random(number)
        good = []
        for i in range(60):
            kind = chance.randrange(4)
            if kind == 0:
                counter.note(c.submit(_later, (number, i), chance.random() * 0.01))
            elif kind == 1:
                counter.note(c.submit(int, "no number"))
                continue
            elif kind == 2:
                counter.note(c.put((number, i)))
            else:
                counter.note((number, i))
            good.append(i)
        expected[number] = good

    threads = [threading.Thread(target=run, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = counter.notes().result(30)
    for number, good in expected.items():
        assert [i for who, i in seen if who == number] == good
