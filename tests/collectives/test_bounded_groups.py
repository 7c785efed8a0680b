"""Bounded allreduces of Groups: late ranks, wrong arguments, deaths, and arrays that come back."""

from __future__ import annotations

import json
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError, StoreFullError, ml
from hoplite_mp._simulation.prediction.recording import NotRecorded, read
from tests.support.group_members import in_threads
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster, Group

SOON_S = 0.01  # a deadline that is over when enough ranks have called
items = pytest.mark.parametrize("items", [1, 5, 100_000])


@items
def test_a_late_rank_gets_the_results_of_the_others(cluster: Cluster, items: int) -> None:
    """It is late by three calls, and then takes part again."""
    gate = threading.Event()

    def body(group: Group) -> Any:
        found = []
        group.allreduce(
            1.0, num=3, deadline=SOON_S
        )  # from now on a thread takes part for each rank
        if group.rank == 2:
            assert gate.wait(PATIENCE_S)
        for call in range(3):
            x = np.full(items, float(10**group.rank * (call + 1)), np.float32)
            found.append((group.allreduce(x, num=2, deadline=SOON_S), group.contributors))
        gate.set()
        x = np.full((2, items), float(group.rank))
        found.append((group.allreduce(x, "max", num=3, deadline=SOON_S), group.contributors))
        return found

    found = in_threads(cluster, f"late {items}", 3, body)
    for one in found:
        assert [about for _, about in one] == [(0, 1)] * 3 + [(0, 1, 2)]
        for call in range(3):
            assert one[call][0].dtype == np.float32
            np.testing.assert_array_equal(one[call][0], np.full(items, 11.0 * (call + 1)))
        np.testing.assert_array_equal(one[3][0], np.full((2, items), 2.0))


def test_other_calls_and_messages_are_not_disturbed(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        other = 1 - group.rank
        future = group.allreduce_async(3.0, deadline=SOON_S, num=2)
        group.send(group.rank, other)
        out = np.zeros(4)
        total = group.allreduce(np.ones(4), out=out, deadline=5, num=2)
        assert total is out
        assert group.calls is None or group.calls == 0
        return group.allgather(group.recv(other)), future.result()[()], out.tolist(), group.calls

    assert in_threads(cluster, "mixed", 2, body) == [([1, 0], 6.0, [2.0] * 4, 1)] * 2


BAD = {
    "num too large": ({"num": 4, "deadline": 1}, "num=4: it must be from 1 to 3"),
    "num of 0": ({"num": 0, "deadline": 1}, "num=0: it must be from 1 to 3"),
    "no deadline": ({"num": 2, "deadline": None}, "deadline=None"),
    "deadline of 0": ({"deadline": 0}, "deadline=0: it must be more than 0 seconds"),
    "not a number": ({"deadline": float("nan")}, "deadline=nan: it must be more than 0"),
    "function": ({"deadline": 1, "op": lambda a, b: a}, "with deadline= it must be a name"),
    "robust": ({"deadline": 1, "op": ml.Median()}, "with deadline= it must be a name"),
    "finite": ({"deadline": 1, "finite": True}, "finite=True cannot be used with num="),
    "list": ({"deadline": 1, "x": [1.0, 2.0]}, "takes arrays, numbers and bools, not list"),
    "unknown op": ({"deadline": 1, "op": "summ"}, "unknown op 'summ'"),
}


def test_wrong_arguments_are_one_error_on_every_rank(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        texts = []
        for bad, words in BAD.values():
            about: dict[str, Any] = {"x": np.ones(3), "deadline": 1.0, "num": 3}
            about.update(bad if group.rank == 1 else {})  # type: ignore[call-overload]
            with pytest.raises((ValueError, TypeError)) as error:
                group.allreduce(**about)
            assert str(error.value).startswith("rank 1: ")
            assert words in str(error.value)
            texts.append(str(error.value))
        with pytest.raises(
            ValueError, match="ranks 0 and 1 of a bounded allreduce differ"
        ) as error:
            group.allreduce(np.ones(2 + (group.rank == 1)), deadline=1.0, num=3)
        return [*texts, str(error.value), float(group.allreduce(2.0, num=3, deadline=1))]

    found = in_threads(cluster, "bad", 3, body)
    assert found[0] == found[1] == found[2]
    assert found[0][-1] == 6.0


def test_a_call_that_times_out_ends_the_membership(cluster: Cluster) -> None:
    """The rank joins again, and takes part in the call that the other one makes then."""
    left, again = threading.Event(), threading.Event()

    def first(group: Group) -> Any:
        assert left.wait(PATIENCE_S)
        again.wait(PATIENCE_S)
        return float(group.allreduce(1.0, num=2, deadline=SOON_S)), group.contributors

    def second() -> Any:
        group = cluster.group("timed", 2, 1, timeout=0.5)
        with pytest.raises(HopliteTimeoutError, match="too few ranks are in time"):
            group.allreduce(1.0, num=2, deadline=SOON_S)
        with pytest.raises(ClosedError):
            group.barrier()
        left.set()
        with cluster.group("timed", 2, 1, timeout=60) as group:
            again.set()
            return float(group.allreduce(2.0, num=2, deadline=SOON_S)), group.contributors

    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(second()))]
    with cluster.group("timed", 2, 0, timeout=60) as group:
        threads[0].start()  # now, because its timeout is also that of the join
        found.append(first(group))
        threads[0].join(PATIENCE_S)
    # The first rank may have called before the second one had joined again.
    assert sorted(found) in ([(3.0, (0, 1))] * 2, [(1.0, (0,)), (2.0, (1,))])


@pytest.mark.parametrize("victim", [0, 1, 2], ids=["leader", "middle", "last"])
def test_a_member_is_killed(tmp_path: Path, victim: int) -> None:
    """The others go on without it, and then with another member of its rank."""

    def member(rank: int, is_new: bool, folder: Path) -> Any:
        group = hoplite_mp.current().group("killed", 3, rank, timeout=60)
        found, last = [], 0.0
        if not is_new:
            found.append(float(group.allreduce(10.0**rank, num=3, deadline=60)))
            if rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            eventually(lambda: victim not in group.alive, "the death")
            found.append(float(group.allreduce(10.0**rank, num=3, deadline=60)))
            (folder / f"over-{rank}").touch()
        # All ranks end with the same call.
        while len(group.contributors) < 3:
            last = float(group.allreduce(10.0**rank, num=3, deadline=60))
        return [*found, last]

    others = [rank for rank in range(3) if rank != victim]
    with hoplite_mp.Cluster(workers=4, memory="256MiB") as c:
        run = c.options(retries=0)
        tasks = [run.submit(member, rank, False, tmp_path) for rank in range(3)]
        for rank in others:
            eventually((tmp_path / f"over-{rank}").exists, "the call without it")
        new = run.submit(member, victim, True, tmp_path)
        assert new.result(timeout=PATIENCE_S) == [111.0]
        for rank in others:
            found = tasks[rank].result(timeout=PATIENCE_S)
            assert found == [111.0, 111.0 - 10.0**victim, 111.0]


def test_strict_groups_raise_after_a_death(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        group.allreduce(1.0, deadline=60, num=2)
        if group.rank == 1:
            return None
        eventually(lambda: group.alive == (0,), "the end of rank 1")
        with pytest.raises(PeerLostError, match=r"ranks \[1\] are lost"):
            group.allreduce(1.0, deadline=60, num=2)
        return group.contributors

    assert in_threads(cluster, "strict", 2, body, strict=True)[0] == (0,)


@pytest.mark.parametrize("compressor", [ml.TopK(0.2), ml.Quantise(8, block=16)], ids=repr)
def test_feedback_keeps_what_was_late(cluster: Cluster, compressor: Any) -> None:
    """Results and residuals together are all that was given, and a late rank loses nothing."""
    gate = threading.Event()
    steps, shape = 6, (12, 9)

    def given(rank: int) -> Any:
        return np.random.default_rng(rank).normal(size=(steps, *shape)).astype(np.float32)

    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, compressor)
        results, members = [], []
        for step, grad in enumerate(given(group.rank)):
            if group.rank == 1 and step == 1:
                assert gate.wait(PATIENCE_S)
            num = 2 if step < 4 else 3
            results.append(feedback.allreduce("w", grad, "sum", num=num, deadline=SOON_S))
            members.append(feedback.contributors)
            if group.rank == 0 and step == 3:
                gate.set()
        return results, members, feedback.residual("w"), feedback.sent

    found = in_threads(cluster, f"feedback {compressor}", 3, body)
    results, members, _, _ = found[0]
    for others, its, _, sent in found:
        assert [one.tobytes() for one in others] == [one.tobytes() for one in results]
        assert its == members
        assert sent > 0
    assert members[1:4] == [(0, 2)] * 3
    assert members[4:] == [(0, 1, 2)] * 2
    total = np.sum(results, axis=0, dtype=float).reshape(-1)
    total += np.sum([residual for _, _, residual, _ in found], axis=0)
    expected = sum(given(rank).sum(0, float) for rank in range(3))
    np.testing.assert_allclose(total, np.reshape(expected, -1), atol=1e-4)


def test_feedback_refuses_the_same_on_all_ranks(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        feedback = ml.Feedback(group, ml.TopK(0.5))
        grad = np.full(4, np.nan if group.rank == 1 else 1.0, np.float32)
        with pytest.raises(
            ValueError, match=r"rank 1: .*'w' has values that are not finite"
        ) as one:
            feedback.allreduce("w", grad, num=2, deadline=60)
        with pytest.raises(ValueError, match="PowerSGD") as other:
            ml.Feedback(group, ml.PowerSGD(2)).allreduce("w", np.eye(4), num=2, deadline=60)
        assert feedback.residual("w") is None
        return str(one.value), str(other.value)

    first, second = in_threads(cluster, "refused", 2, body)
    assert first == second


def test_the_end_of_a_group_leaves_no_thread(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        group.allreduce(1.0, deadline=60, num=2)

    in_threads(cluster, "ended", 2, body)
    names = [one.name for one in threading.enumerate()]
    assert "hoplite_mp rounds" not in names


def test_deadlines_that_differ_slightly_are_both_in_the_error(cluster: Cluster) -> None:
    def body(group: Group) -> Any:
        group.allreduce(1.0, deadline=60 + group.rank / 1e9, num=2)

    first, second = in_threads(cluster, "slightly", 2, body)
    assert str(first) == str(second)
    assert "deadline=60.0 and " in str(first)
    assert "deadline=60.000000001" in str(first)


@pytest.mark.parametrize("error", [StoreFullError, PeerLostError])
def test_a_rank_whose_thread_has_failed_stops_no_other_rank(
    cluster: Cluster, error: type[Exception]
) -> None:
    """Rank 0 goes on while the program of rank 1 is busy, although the death of rank 2 needs a
    round. The next call of rank 1 ends its membership."""
    done, left = threading.Event(), threading.Event()

    def fail(*_: Any) -> None:
        raise error("failed")

    def body(group: Group) -> Any:
        group.allreduce(1.0, deadline=60, num=3)
        if group.rank == 2:
            return left.wait(PATIENCE_S)
        if group.rank == 0:
            eventually(lambda: group.alive == (0, 1), "the end of rank 2")
            total = float(group.allreduce(1.0, deadline=SOON_S, num=1))
            done.set()
            return total
        rounds = group._bounded._rounds  # type: ignore[union-attr]
        rounds._core.receive_report = fail  # type: ignore[union-attr, method-assign]
        left.set()
        assert done.wait(PATIENCE_S)
        with pytest.raises(error, match="failed"):
            group.allreduce(1.0, deadline=60, num=1)
        with pytest.raises(ClosedError, match="join it again"):
            group.allreduce(1.0, deadline=60, num=1)
        return None

    assert in_threads(cluster, f"failed {error.__name__}", 3, body) == [1.0, None, True]


def test_an_interrupted_end_of_a_group_is_completed_by_the_next_attempt(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the Group of the rounds is left then."""
    group = cluster.group("interrupted end", 1, 0)
    group.allreduce(1.0, deadline=60)
    thread = group._bounded._rounds.thread  # type: ignore[union-attr]

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(thread, "join", interrupt)
    monkeypatch.setattr(thread, "is_alive", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        group.close()
    monkeypatch.undo()
    group.close()
    assert not [leave for leave in cluster._runtime.task_leaves if "rounds" in leave.__self__.name]
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_group_of_rounds_that_nobody_refers_to_is_left(cluster: Cluster) -> None:
    """Ctrl-C may interrupt a first call right after it has joined the Group of the rounds."""
    group = cluster.group("joined", 1, 0)
    group.allreduce(1.0, deadline=60)
    group._bounded._rounds.end()  # type: ignore[union-attr]
    group._bounded._rounds = None  # type: ignore[union-attr]
    group._make_rounds()
    group.close()
    assert not [leave for leave in cluster._runtime.task_leaves if "rounds" in leave.__self__.name]


def test_traces_contain_bounded_calls_which_predictions_refuse(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Otherwise their time would count as computation."""
    with cluster.trace(tmp_path / "run.json"), cluster.group("traced", 1, 0) as group:
        for _ in range(8):
            group.allreduce(np.zeros(10), deadline=60)
            group.barrier()
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    traced = [one for one in events if one["name"] == "bounded_allreduce traced"]
    assert [one["args"]["bytes_in"] for one in traced] == [80] * 8
    with pytest.raises(NotRecorded, match="bounded_allreduce cannot be played"):
        read(tmp_path / "run.json")


def test_a_result_that_the_program_has_dropped_is_freed(cluster: Cluster) -> None:
    with cluster.group("dropped", 1, 0) as group:
        total = group.allreduce(np.ones((2, 2)), deadline=60)
        kept = weakref.ref(total if total.base is None else total.base)
        del total
        eventually(lambda: kept() is None, "the end of the array")
