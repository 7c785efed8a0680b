"""What errors say: what, where, how much, and what to do."""

from __future__ import annotations

import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import HopliteTimeoutError, ObjectLostError, WorkerLostError
from tests.support.waiting import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster


def nap(seconds: float) -> None:
    time.sleep(seconds)


def test_a_task_that_ran_too_long(cluster: Cluster) -> None:
    future = cluster.options(timeout=0.2).submit(nap, 30)
    with pytest.raises(
        HopliteTimeoutError, match=r"nap\(\) ran longer than its timeout of 0\.2 s on worker \d+@h0"
    ) as caught:
        future.result(PATIENCE_S)
    assert caught.value.__cause__ is None, "no worker raised it"


def test_a_wait_that_was_too_short(cluster: Cluster) -> None:
    future = cluster.submit(nap, 30)
    with pytest.raises(HopliteTimeoutError, match=r"of nap\(\) was not ready within 0\.1 s$"):
        cluster.get(future, timeout=0.1)
    with pytest.raises(HopliteTimeoutError, match=r"within 0 s$"):
        future.result(0)
    future.cancel(force=True)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_map_that_took_too_long_names_its_timeout(
    cluster: Cluster, tmp_path: Path, ordered: bool
) -> None:
    go = tmp_path / "go"
    results = cluster.map(wait_for, [go], timeout=0.2, ordered=ordered)
    with pytest.raises(HopliteTimeoutError, match=r"ready within the 0\.2 s of map\(\)$"):
        next(results)
    go.touch()
    with pytest.raises(HopliteTimeoutError, match="ran longer"):  # a task's own
        next(cluster.options(timeout=0.1).map(nap, [30], timeout=60, ordered=ordered))


def test_a_deleted_object_is_named_as_its_ref(cluster: Cluster) -> None:
    ref = cluster.put(bytes(1000))
    cluster.delete(ref)
    with pytest.raises(ObjectLostError) as caught:
        cluster.get(ref)
    assert str(caught.value) == f"{ref} was deleted"
    future = cluster.submit(abs, -1)
    assert future.ref.id in repr(future)


@pytest.mark.parametrize("timeout", ["a", True, [1], 1j])
@pytest.mark.parametrize(
    "call",
    [
        lambda c, t: c.get(c.put(1), timeout=t),
        lambda c, t: c.wait([c.put(1)], timeout=t),
        lambda c, t: c.submit(abs, 1).result(t),
        lambda c, t: c.submit(abs, 1).exception(t),
        lambda c, t: c.map(abs, [1], timeout=t),
        lambda c, t: list(hoplite_mp.as_completed([c.submit(abs, 1)], t)),
        lambda c, t: c.options(timeout=t),
        lambda c, t: c.group("timeouts", 1, timeout=t),
    ],
)
def test_a_timeout_that_is_none(cluster: Cluster, call: Any, timeout: Any) -> None:
    with pytest.raises(TypeError, match=r"timeout=.*: it must be a number of seconds"):
        call(cluster, timeout)


def locked() -> Any:
    return threading.Lock()


def test_a_result_that_does_not_pickle(cluster: Cluster) -> None:
    error = cluster.submit(locked).exception(PATIENCE_S)
    assert type(error) is TypeError
    assert str(error).startswith("the result of locked(), a lock, does not pickle: TypeError: ")
    assert "locked" in "".join(traceback.format_exception(error))


def missing_model() -> None:
    raise FileNotFoundError("no such model: left.bin")


def test_a_failing_initializer_says_what_it_raised(cluster: Cluster) -> None:
    with cluster.executor(1, initializer=missing_model) as own:
        error = own.submit(abs, 1).exception(PATIENCE_S)
    assert type(error) is WorkerLostError
    assert "its initializer raised FileNotFoundError: no such model: left.bin" in str(error)
    text = str(error.__cause__)
    assert "in missing_model" in text
    assert "in worker " in text


def odd_model() -> None:
    raise ValueError("no such model: caf\udce9.bin")


def test_an_initializer_whose_error_has_lone_surrogates(cluster: Cluster) -> None:
    with cluster.executor(1, initializer=odd_model) as own:
        error = own.submit(abs, 1).exception(PATIENCE_S)
    assert type(error) is WorkerLostError
    assert "its initializer raised ValueError: no such model: caf?.bin" in str(error)
    assert "in odd_model" in str(error.__cause__)


def test_functions_and_classes_whose_names_have_lone_surrogates(cluster: Cluster) -> None:
    def five(self: Any = None) -> int:
        return 5

    def fives() -> Any:
        yield 5

    five.__name__ = five.__qualname__ = fives.__name__ = fives.__qualname__ = "caf\udce9"
    kind = type("Kind", (), {"five": five, "caf\udce9": five})
    kind.__qualname__ = "caf\udce9"
    assert cluster.submit(five).result(PATIENCE_S) == 5
    assert list(cluster.map(five, [1, 2], chunksize=2)) == [5, 5]
    assert [cluster.get(one) for one in cluster.stream(fives)] == [5]
    with cluster.executor(1, initializer=five) as own:
        assert own.submit(five).result(PATIENCE_S) == 5
    actor: Any = cluster.options(restarts=1).actor(kind)
    assert actor.five().result(PATIENCE_S) == 5
    assert getattr(actor, "caf\udce9")().result(PATIENCE_S) == 5
    assert "caf?" in repr(actor)


def test_errors_that_no_worker_raised_have_no_empty_traceback(cluster: Cluster) -> None:
    refs = [cluster.put([1.0]), cluster.put("text")]
    with pytest.raises(ValueError, match="neither an array nor a number") as caught:
        cluster.get(cluster.reduce(refs))
    assert caught.value.__cause__ is None


def test_the_executor_has_no_context() -> None:
    with pytest.raises(TypeError, match=r"mp_context=.*leave the argument out"):
        hoplite_mp.Executor(1, mp_context="spawn")  # type: ignore[arg-type]
    with hoplite_mp.Executor(1, mp_context=None) as own:
        assert own.submit(abs, -1).result() == 1


def test_a_member_that_was_refused_is_told_of(cluster: Cluster, tmp_path: Path) -> None:
    here, refused = tmp_path / "here", tmp_path / "refused"

    def waits() -> str:
        group = hoplite_mp.current().group("refusing", 2, 0, timeout=0.3)
        here.touch()
        wait_for(refused)
        try:
            group.barrier()
        except HopliteTimeoutError as error:
            return str(error)
        return "it filled"

    first = cluster.submit(waits)
    wait_for(here)
    group = cluster.submit(lambda: hoplite_mp.current().group("refusing", 3, 1))
    error = group.exception(PATIENCE_S)
    assert isinstance(error, ValueError)
    refused.touch()
    words = first.result(PATIENCE_S)
    told = "1 of 2 members joined within timeout=0.3 s; missing: rank 1, which never joined or left"
    assert f"{told} again; one was refused: " in words
    assert str(error) in words
