"""`Cluster.trace` on one host: the file as a reader of it sees it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import Config
from hoplite_mp._cli import dump
from tests.support.functions import fail
from tests.support.timeline import Timeline
from tests.support.waiting import PATIENCE_S, eventually, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


def work(i: int) -> int:
    return i


def outer(i: int) -> int:
    c = hoplite_mp.current()
    return c.get(c.submit(work, i)) + c.get(c.submit(work, i))


def left(cluster: Cluster, tasks: int = 0) -> None:
    """A result is there a moment before its worker has left the task: a trace that begins or ends
    in between shows it as running."""
    eventually(lambda: len(dump.collect(cluster)["nodes"][0]["running"]["first"]) == tasks)


def test_every_task_once(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    before = [cluster.submit(work, i) for i in range(20)]
    cluster.wait(before)
    left(cluster)
    with cluster.trace(path):
        futures = [cluster.submit(work, i) for i in range(300)]
        futures += [cluster.submit(outer, i) for i in range(20)]
        bad = [cluster.submit(fail) for _ in range(5)]
        cluster.wait(futures + bad)
        left(cluster)
    after = cluster.submit(work, 0)
    after.result()
    found = Timeline(path)
    outcomes = found.outcomes()
    assert {future.ref.id: outcomes[future.ref.id] for future in futures} == {
        future.ref.id: ["done"] for future in futures
    }
    assert [outcomes[future.ref.id] for future in bad] == [["failed"]] * 5
    assert not outcomes.keys() & {future.ref.id for future in [*before, after]}
    # Of each outer one the two inner ones, which ran in place or in the other worker.
    assert Counter(task["name"] for task in found.of("task")) == {
        "work": 340, "outer": 20, "fail": 5,
    }  # fmt: skip
    assert all(len(one) == 1 for one in outcomes.values())
    assert found.other["lost"] == []
    assert found.other["dropped"] == {}
    assert all(re.fullmatch(r"worker \d+", name) for name in found.tracks.values())


def test_what_began_before_and_what_still_runs(cluster: Cluster, tmp_path: Path) -> None:
    path, go = tmp_path / "run.json", [tmp_path / "one", tmp_path / "two"]
    first, second = (cluster.submit(wait_for, file) for file in go)
    eventually(lambda: first.running() and second.running())
    with cluster.trace(path):
        go[0].touch()
        first.result()
        begun = time.monotonic()
        time.sleep(0.05)
        left(cluster, 1)
        seconds = time.monotonic() - begun
    go[1].touch()
    second.result()
    left(cluster)
    found = Timeline(path)
    assert found.outcomes() == {first.ref.id: ["done"], second.ref.id: ["running"]}
    for task in found.of("task"):
        assert task["ts"] == 0
        assert task["args"]["began_before_us"] > 0
    assert max(task["dur"] for task in found.of("task")) >= seconds * 1e6


def test_an_exception_still_writes_the_file(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with pytest.raises(LookupError), cluster.trace(path):
        cluster.submit(fail).result()
    left(cluster)
    assert len(Timeline(path).of("task")) == 1
    assert os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda path: path / "no such directory" / "run.json", FileNotFoundError),
        (lambda path: path, IsADirectoryError),
        (lambda path: path / "file" / "run.json", NotADirectoryError),
    ],
)
def test_a_path_that_cannot_be(
    cluster: Cluster, tmp_path: Path, make: Callable[[Path], Path], error: type[OSError]
) -> None:
    """At the call, before anything is traced."""
    (tmp_path / "file").touch()
    with pytest.raises(error):
        cluster.trace(make(tmp_path))
    assert os.listdir(tmp_path) == ["file"]


def test_an_older_file_is_replaced_only_at_the_end(cluster: Cluster, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("older")
    with cluster.trace(str(path)):
        assert path.read_text() == "older"
        assert os.listdir(tmp_path) == ["run.json"]
    assert Timeline(path).other["program"].startswith("hoplite_mp ")


def test_one_trace_at_a_time(cluster: Cluster, tmp_path: Path) -> None:
    """The second one is refused, also from a task, and does no harm to the first."""

    def another(path: str) -> str:
        try:
            with hoplite_mp.current().trace(path):
                return "begun"
        except RuntimeError as error:
            return str(error)

    with cluster.trace(tmp_path / "one.json"):
        with pytest.raises(RuntimeError, match="already being traced by a process at h0"):
            cluster.trace(tmp_path / "two.json").__enter__()
        assert "being traced" in cluster.submit(another, str(tmp_path / "three.json")).result()
    assert len(Timeline(tmp_path / "one.json").of("task")) == 1
    assert cluster.submit(another, str(tmp_path / "four.json")).result() == "begun"
    # Perhaps the task before it, too: its result is there a moment before its end.
    own = Timeline(tmp_path / "four.json").of("task")[-1]
    assert (own["name"], own["args"]["outcome"]) == ("another", "running")
    assert sorted(os.listdir(tmp_path)) == ["four.json", "one.json"]
    with cluster.trace(tmp_path / "five.json") as trace, pytest.raises(RuntimeError, match="befo"):
        trace.__enter__()


def test_groups_reductions_and_their_tracks(cluster: Cluster, tmp_path: Path) -> None:
    def member(rank: int) -> float:
        g = hoplite_mp.current().group("traced", 2, rank)
        return float(sum(g.allreduce(np.ones(4))[0] for _ in range(5)))

    path = tmp_path / "run.json"
    with cluster.trace(path):
        assert [f.result() for f in cluster.spmd(member, 2)] == [10.0, 10.0]
        parts = [cluster.put(np.full(1000, i)) for i in range(4)]
        total = cluster.reduce(parts, num=3)
        cluster.get(total)
    found = Timeline(path)
    calls = found.of("group call")
    assert Counter(call["name"] for call in calls) == {"allreduce traced": 10}
    assert Counter((c["args"]["call"], c["args"]["rank"]) for c in calls) == {
        (call, rank): 1 for call in range(5) for rank in range(2)
    }
    (reduction,) = [e for e in found.of("collective") if e["name"] == "reduce"]
    assert tuple(reduction["args"]["members"]) == total.contributors
    assert {key: reduction["args"][key] for key in ("kind", "op", "sources", "outcome")} == {
        "kind": "reduce", "op": "sum", "sources": 4, "outcome": "committed",
    }  # fmt: skip


def test_a_cancelled_and_a_killed_task(tmp_path: Path) -> None:
    def die_once(path: str) -> str:
        if not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return "lived"

    path = tmp_path / "run.json"
    config = Config(cancel_grace_s=PATIENCE_S)  # what is cancelled has time to end
    with hoplite_mp.Cluster(workers=1, memory="64MiB", config=config) as c:
        with c.trace(path):
            killed = c.submit(die_once, str(tmp_path / "died"))
            assert killed.result() == "lived"
            late = c.options(timeout=0.1).submit(time.sleep, 60)
            assert isinstance(late.exception(), hoplite_mp.HopliteTimeoutError)
            unwanted = c.submit(time.sleep, 60)
            eventually(unwanted.running)
            assert unwanted.cancel(force=True)
            assert c.submit(work, 1).result() == 1  # the worker has left it
        outcomes = Timeline(path).outcomes()
    assert outcomes[killed.ref.id] == ["lost", "done"]
    assert outcomes[late.ref.id] == ["timeout"]
    assert outcomes[unwanted.ref.id] == ["cancelled"]


def test_the_oldest_are_dropped_and_counted(tmp_path: Path) -> None:
    path, most, tasks = tmp_path / "run.json", 100, 1500
    config = Config(trace_events_max=most)
    with hoplite_mp.Cluster(workers=1, memory="64MiB", config=config) as c:
        with c.trace(path):
            futures = [c.submit(work, i) for i in range(tasks)]
            c.wait(futures)
        found = Timeline(path)
        assert list(found.outcomes()) == [future.ref.id for future in futures[-most:]]
        assert found.other["dropped"] == {"h0": tasks - most}
        assert any(f"{tasks - most} events of h0 were dropped" in text for text in found.said)
        with c.trace(path):  # the next one begins anew
            c.submit(work, 1).result()
        assert Timeline(path).other["dropped"] == {}


def test_spilling(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with hoplite_mp.Cluster(workers=0, memory="32MiB", spill_dir="/var/tmp") as c:
        with c.trace(path):
            refs = [c.put(np.full(1 << 20, i)) for i in range(8)]  # of 8 MiB
            assert c.get(refs[0])[0] == 0
            spilled = c.stats()["bytes_spilled"]
        found = Timeline(path).of("spill")
    ids = {ref.id for ref in refs}
    assert {event["args"]["object"] for event in found} <= ids
    moved = Counter[str]()
    for event in found:
        assert event["args"]["bytes"] > 8 << 20
        moved[event["name"]] += event["args"]["bytes"]
    assert moved["spill"] - moved["restore"] == pytest.approx(spilled, rel=0.01)
    assert refs[0].id in {e["args"]["object"] for e in found if e["name"] == "restore"}


def test_a_cluster_that_ends_in_between(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        trace = c.trace(tmp_path / "run.json")
        with pytest.raises(hoplite_mp.ClosedError), trace:
            c.shutdown()
        with pytest.raises(hoplite_mp.ClosedError):
            c.trace(tmp_path / "run.json")
    assert os.listdir(tmp_path) == []


def test_a_trace_ends_with_the_worker_that_began_it(tmp_path: Path) -> None:
    def begin_and_die(path: str) -> None:
        hoplite_mp.current().trace(path).__enter__()
        os.kill(os.getpid(), signal.SIGKILL)

    with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
        dead = c.options(retries=0).submit(begin_and_die, str(tmp_path / "never.json"))
        assert isinstance(dead.exception(), hoplite_mp.WorkerLostError)
        with c.trace(tmp_path / "run.json"):
            c.submit(work, 1).result()
        assert len(Timeline(tmp_path / "run.json").of("task")) == 1
