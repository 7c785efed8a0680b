"""What a handle does: calls, arguments, results, mistakes."""

import concurrent.futures
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp import Actor
from tests.support.functions import Counter, MadeWhen, Refuses
from tests.support.waiting import eventually


def test_a_state_is_kept_between_calls(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter, 10)
    assert [counter.add().result(20) for _ in range(3)] == [11, 12, 13]
    assert counter.add(amount=5).result(20) == 18
    assert counter(2).result(20) == 36
    assert counter.double(4).result(20) == 8


def test_refs_among_arguments_are_resolved(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter, c.submit(int, "100"))
    assert counter.add(c.put(5)).result(20) == 105
    assert counter.note({"a": [c.put(1), (c.submit(int, "2"),)]}).result(20) == 1
    assert counter.notes().result(20) == [{"a": [1, (2,)]}]


def test_a_future_of_a_call_is_an_argument_like_any(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    future = counter.add(3)
    assert isinstance(future, concurrent.futures.Future)
    assert c.submit(lambda x: x + 1, future).result(20) == 4
    assert c.get(c.reduce([future, counter.add(4)])) == 3 + 7


def test_large_arguments_and_results(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    array = np.arange(200_000.0)
    counter.note(array)
    counter.note(c.put(array))
    first, second = counter.notes().result(20)
    np.testing.assert_array_equal(first, array)
    np.testing.assert_array_equal(second, array)
    (copied, _) = counter.notes.options(copy=True)().result(20)
    copied[0] = 1.0


def test_what_a_method_raises(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    with pytest.raises(KeyError, match="on purpose"):
        counter.fail().result(20)
    assert counter.add().result(20) == 1


def test_every_call_raises_what_the_constructor_raised(c: hoplite_mp.Cluster) -> None:
    broken = c.actor(Refuses, "because")
    early = broken.anything()
    with pytest.raises(ValueError, match="because"):
        early.result(20)
    with pytest.raises(ValueError, match="because"):
        broken.anything().result(20)


def test_a_constructor_whose_argument_failed(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter, c.submit(int, "no number"))
    with pytest.raises(ValueError, match="no number"):
        counter.add().result(20)


def test_names_that_are_no_methods(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    with pytest.raises(AttributeError, match=r"no method 'value'.*not its data"):
        _ = counter.value
    with pytest.raises(AttributeError, match="cannot set 'value'"):
        counter.value = 3
    with pytest.raises(TypeError, match="not callable"):
        c.actor(Refuses)()
    with pytest.raises(AttributeError):
        counter.close()
    assert dir(counter) == sorted(
        [
            "__call__",
            "add",
            "call_me",
            "double",
            "end",
            "fail",
            "note",
            "notes",
            "pass_on",
            "pid",
            "wait",
            "wait_for",
        ]
    )


def test_the_names_of_the_class_win(c: hoplite_mp.Cluster) -> None:
    class File:
        def close(self) -> str:
            return "the file's"

        def kill(self) -> str:
            return "its own"

    handle = c.actor(File)
    assert handle.close().result(20) == "the file's"
    assert handle.kill().result(20) == "its own"
    Actor.close(handle)
    with pytest.raises(hoplite_mp.ActorLostError, match="File was closed"):
        handle.close().result(20)


def test_classes_of_the_main_program_and_local_ones_travel_by_value(
    c: hoplite_mp.Cluster,
) -> None:
    offset = 7

    class Local:
        def get(self, x: int) -> int:
            return x + offset

    assert c.actor(Local).get(1).result(20) == 8


def test_mistakes(c: hoplite_mp.Cluster) -> None:
    with pytest.raises(TypeError, match=r"created from a class, not from <function"):
        c.actor(lambda: 0)
    with pytest.raises(TypeError, match=r"Cluster\.actor"):
        Actor()
    with pytest.raises(TypeError, match="unknown option retries"):
        c.actor(Counter).add.options(retries=1)
    with pytest.raises(ValueError, match="timeout"):
        c.actor(Counter).add.options(timeout=0)
    with pytest.raises(ValueError, match="restarts"):
        c.options(restarts=-1)


def test_waiting_for_a_later_call_to_itself(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    with pytest.raises(RuntimeError, match=r"Counter.add\(\) is a later call to this actor"):
        counter.call_me(counter).result(20)
    other = c.actor(Counter, 41)
    assert counter.call_me(other).result(20) == 42


class Lives:
    """Says which process it lives in."""

    def pid(self) -> int:
        return os.getpid()


def test_an_actor_ends_soon_after_a_last_call_for_which_nobody_has_waited() -> None:
    with hoplite_mp.Cluster(workers=0) as c:  # of its own: nothing else keeps its threads awake
        runtime = c._runtime
        collector = runtime.submitter.collector
        collector.start()
        eventually(lambda: collector._resting)
        call = c.actor(Lives).pid()
        eventually(lambda: runtime.tasks.done(call._oid))
        pid = call.result(0)
        eventually(lambda: not psutil.pid_exists(pid))


class Sends:
    """Gives work to the cluster that it is in."""

    def pids(self) -> list[int]:
        c = hoplite_mp.current()
        there = [
            c.submit(os.getpid),
            c.options(node="h0").submit(os.getpid),
            c.options(priority=1).submit(os.getpid),
        ]
        pids = [os.getpid(), *(one.result(20) for one in there)]
        return [*pids, *c.map(_pid_for, range(2)), *(c.get(ref) for ref in c.stream(_own_pid))]


def _pid_for(_: int) -> int:
    return os.getpid()


def _own_pid() -> Iterator[int]:
    yield os.getpid()


@pytest.mark.parametrize("concurrency", [1, 2])
def test_what_an_actor_sends_runs_in_the_clusters_workers(
    c: hoplite_mp.Cluster, concurrency: int
) -> None:
    """Its process is for its calls alone, and it may wait for what it has sent."""
    own, *others = c.options(concurrency=concurrency).actor(Sends).pids().result(60)
    assert own not in others


def test_an_actor_of_a_cluster_without_workers_runs_what_it_sends() -> None:
    """When the call that has sent it has ended."""

    class Keeps:
        def send(self) -> None:
            self.future = hoplite_mp.current().submit(os.getpid)

        def pids(self) -> tuple[int, int]:
            return self.future.result(20), os.getpid()

    with hoplite_mp.Cluster(workers=0) as c:
        keeps = c.actor(Keeps)
        keeps.send().result(60)
        sent, own = keeps.pids().result(60)
        assert sent == own


def test_a_call_that_has_not_begun_is_cancelled(c: hoplite_mp.Cluster, tmp_path: Path) -> None:
    counter = c.actor(Counter)
    running = counter.wait_for(str(tmp_path / "go"))
    waiting = counter.add()
    last = counter.add(10)
    eventually(running.running)
    assert waiting.cancel()
    assert not running.cancel(force=True)
    (tmp_path / "go").touch()
    assert running.result(20) == "waited"
    assert last.result(20) == 10
    with pytest.raises(concurrent.futures.CancelledError):
        waiting.result(20)


def test_a_timeout_ends_the_process(c: hoplite_mp.Cluster) -> None:
    counter = c.options(restarts=1).actor(Counter, 5)
    with pytest.raises(TimeoutError, match="longer than its timeout"):
        counter.wait.options(timeout=0.2)(30).result(20)
    assert counter.add().result(20) == 6
    assert Actor.restarts(counter) == 1


def test_opening_does_not_wait_for_the_constructor(c: hoplite_mp.Cluster, tmp_path: Path) -> None:
    slow = c.actor(MadeWhen, str(tmp_path / "go"))
    future = slow.add()
    assert not future.done()
    (tmp_path / "go").touch()
    assert future.result(20) == 1


def test_no_foreign_pickler_takes_a_handle_apart(c: hoplite_mp.Cluster) -> None:
    counter = c.actor(Counter)
    again = pickle.loads(pickle.dumps(counter))
    assert again == counter
    assert hash(again) == hash(counter)
    assert again.add().result(20) == 1
    assert "Counter" in repr(again)
