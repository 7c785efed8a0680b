"""`hoplite-mp predict`: steps are found in traces, and played with the right times."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp._cli import main
from hoplite_mp._simulation.prediction import play as playing
from hoplite_mp._simulation.prediction.cores import Cores
from hoplite_mp._simulation.prediction.play import Machines, play
from hoplite_mp._simulation.prediction.recording import (
    STEPS_MIN,
    NotRecorded,
    RecordedCall,
    RecordedTraining,
    read,
)
from hoplite_mp._simulation.prediction.transfer_cpu import measured_byte_s
from hoplite_mp._simulation.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LINK = 125e6  # bytes per second
MIB = 1 << 20

# ---- traces

GAP_US, CALL_US = 1000.0, 250.0


def trace(
    path: Path, calls: Sequence[tuple[str, int]], *, cat: str = "group call", track: str = "x",
    rank: int = 0, **more: Any,
) -> Path:  # fmt: skip
    """A trace with these calls (name, bytes), GAP_US apart."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "h0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 7, "args": {"name": track}},
    ]
    at = 0.0
    for name, nbytes in calls:
        at += GAP_US
        args = {"pid": 4711, "outcome": "done", "rank": rank, "bytes_in": nbytes, "bytes_out": 3}
        events.append(
            {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": 7, "ts": at, "dur": CALL_US,
             "args": args | more}
        )  # fmt: skip
        at += CALL_US
    path.write_text(json.dumps({"traceEvents": events, "otherData": {"dropped": {}}}))
    return path


def test_steps_of_a_member_are_the_shortest_repeating_sequence(tmp_path: Path) -> None:
    layers = [("allreduce training", 400), ("allreduce training", 80), ("barrier training", 0)]
    calls = [("broadcast training", 400), *layers * 9, ("gather training", 8)]
    found = read(trace(tmp_path / "run.json", calls))
    assert not found.is_asynchronous
    assert len(found.steps) == 8  # without the first one
    for step in found.steps:
        assert [(call.kind, call.bytes_in) for call in step] == [
            ("allreduce", 400), ("allreduce", 80), ("barrier", 0)
        ]  # fmt: skip
        for call in step:
            assert call.compute_s == pytest.approx(GAP_US / 1e6)
            assert call.service_s == pytest.approx(CALL_US / 1e6)
    assert found.bytes_of_step == 480 + 9
    assert found.step_s == pytest.approx(3 * (GAP_US + CALL_US) / 1e6)


def test_steps_with_given_number_of_calls_have_that_length(tmp_path: Path) -> None:
    file = trace(tmp_path / "run.json", [("allreduce training", 400)] * 20)
    assert len(read(file).steps) == 19
    assert len(read(file, calls_per_step=2).steps) == 9
    with pytest.raises(NotRecorded, match="20 calls do not repeat in more than 5 steps of 4 calls"):
        read(file, calls_per_step=4)


def test_steps_with_varying_sizes_are_found_by_name(tmp_path: Path) -> None:
    calls = [(name, 7 * at) for at in range(12) for name in ("allgather g", "allreduce g")]
    found = read(trace(tmp_path / "run.json", calls))
    assert len(found.steps) == 11
    assert {len(step) for step in found.steps} == {2}


def test_steps_of_asynchronous_training_are_actor_calls(tmp_path: Path) -> None:
    calls = [("size", 1), *[("pull", 1), ("push", 400)] * 8, ("pull", 1)]
    file = trace(
        tmp_path / "run.json", calls, cat="task", track="actor weights (Server)", bytes_out=90
    )
    found = read(file)
    assert found.name == "weights (Server)"
    assert [[call.kind for call in step] for step in found.steps] == [["pull", "push"]] * 7
    assert found.steps[0][1].bytes_in == 400
    assert found.steps[0][1].bytes_out == 90
    assert read(file, server="weights") == found
    with pytest.raises(NotRecorded, match="no calls of the actor 'Weights'"):
        read(file, server="Weights")


def test_steps_with_missing_result_sizes_use_the_median(tmp_path: Path) -> None:
    """A result may have been released when the end of its task was recorded."""
    calls = [("pull", 1), ("push", 400)] * 8
    file = trace(tmp_path / "run.json", calls, cat="task", track="actor weights (Server)")
    content = json.loads(file.read_text())
    content["traceEvents"][8]["args"]["bytes_out"] = 0
    file.write_text(json.dumps(content))
    assert {call.bytes_out for step in read(file).steps for call in step} == {3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"calls": [("allreduce g", 4)] * STEPS_MIN}, "5 calls do not repeat"),
        ({"calls": [(f"allreduce g{at}", at) for at in range(3)]}, "3 calls do not repeat"),
        ({"rank": 1}, "of ranks up to 1: trace a single worker"),
        ({"calls": [("alltoall g", 4)] * 9}, "alltoall cannot be played"),
        ({"cat": "task"}, "no calls of a Group or an actor"),
        ({"bytes_in": "many"}, "is not a trace of hoplite_mp"),
    ],
)
def test_traces_with_unsupported_calls_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"calls": [("allreduce g", 4)] * 9} | change
    with pytest.raises(NotRecorded, match=message):
        read(trace(tmp_path / "run.json", **given))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": [3], "otherData": {}}', "\x00"])
def test_files_that_are_not_traces_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(NotRecorded, match="is not a trace of hoplite_mp"):
        read(tmp_path / "run.json")


def test_trace_with_dropped_events_is_refused(tmp_path: Path) -> None:
    file = trace(tmp_path / "run.json", [("allreduce g", 4)] * 9)
    content = json.loads(file.read_text())
    content["otherData"]["dropped"] = {"h0": 3}
    file.write_text(json.dumps(content))
    with pytest.raises(NotRecorded, match="events of the trace were dropped"):
        read(file)


class Weights:
    """An actor."""

    def pull(self) -> Any:
        return np.zeros(100_000, np.float32)

    def push(self, grad: Any) -> None: ...


def member(steps: int) -> None:
    with hoplite_mp.current().group("one", 1, 0) as g:
        for _ in range(steps):
            g.allreduce(np.zeros(5000, np.float32))
            g.allgather([1, 2])


def worker(server: Any, steps: int) -> None:
    for _ in range(steps):
        server.pull().result()
        server.push(np.zeros(100_000, np.float32)).result()


def test_traces_of_a_cluster_contain_array_sizes(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1) as c:
        with c.trace(tmp_path / "group.json"):
            c.submit(member, 9).result()
        with c.trace(tmp_path / "actor.json"):
            c.submit(worker, c.actor(Weights), 9).result()
    group, actor = read(tmp_path / "group.json"), read(tmp_path / "actor.json")
    assert [[(call.kind, call.bytes_in) for call in step] for step in group.steps] == [
        [("allreduce", 20_000), ("allgather", 0)]
    ] * 8
    assert actor.name.startswith("Weights, ")
    for pull, push in actor.steps:
        assert (pull.kind, push.kind) == ("Weights.pull", "Weights.push")
        assert 400_000 <= pull.bytes_out <= 401_000
        assert 400_000 <= push.bytes_in <= 401_000
        assert max(pull.bytes_in, push.bytes_out) < 1000


# ---- cores


def ends(
    jobs: Sequence[tuple[float, int, float]], per_host: float, shared: float | None
) -> tuple[list[float], Cores]:
    """When each job (begin, host, CPU seconds) ends."""
    timeline, found = Timeline(0), [0.0] * len(jobs)
    cores = Cores(timeline, 3, per_host, shared, 1e-9)

    def over(at: int) -> None:
        found[at] = timeline.now

    for at, (begin, host, seconds) in enumerate(jobs):
        timeline.at(begin, cores.compute, host, seconds, over, at)
    assert timeline.run(1000, 100.0)
    cores.settle()
    return found, cores


@pytest.mark.parametrize(
    ("jobs", "per_host", "shared", "expected"),
    [
        ([(0, 0, 1), (0, 0, 1)], 1, None, [2, 2]),
        ([(0, 0, 1), (0, 1, 1)], 1, None, [1, 1]),
        ([(0, 0, 1), (0, 0, 1)], 2, None, [1, 1]),
        ([(0, 0, 2), (1, 0, 2)], 1, None, [3, 4]),
        ([(0, 0, 1), (0, 1, 1), (0, 2, 1)], 1, 2, [1.5, 1.5, 1.5]),
        ([(0, 0, 1), (0, 1, 2)], 2, 1, [2, 3]),
        ([(0, 0, 0)], 1, None, [0]),
    ],
)
def test_threads_share_cores_evenly(
    jobs: Any, per_host: float, shared: float | None, expected: list[float]
) -> None:
    found, cores = ends(jobs, per_host, shared)
    assert found == pytest.approx(expected)
    assert sum(cores.used_s) == pytest.approx(sum(seconds for _, _, seconds in jobs))


def test_engine_processes_blocks_in_order() -> None:
    timeline, found = Timeline(0), []
    cores = Cores(timeline, 2, 4, None, 1e-9)
    for host in (0, 0, 1):
        cores.process(host, 10**9, lambda host=host: found.append((host, timeline.now)))
    assert timeline.run(1000, 100.0)
    assert [host for host, _ in found] == [0, 1, 0]
    assert [at for _, at in found] == pytest.approx([1, 1, 2])


def test_transfer_measured_takes_cpu_time() -> None:
    assert 0 < measured_byte_s() < 1e-6


# ---- plays

MACHINES = Machines(2, LINK, 50e-6, 1, None, 0.0)


def steps(*calls: RecordedCall, name: str = "") -> RecordedTraining:
    return RecordedTraining(name, (calls,) * STEPS_MIN)


def test_synchronous_training_of_large_arrays_is_limited_by_the_link() -> None:
    recording = steps(RecordedCall("allreduce", 0.01, 0.0, 4 * MIB, 0))
    found = play(recording, dataclasses.replace(MACHINES, hosts=3), 6, 0)
    bound = 0.01 + 2 * 2 / 3 * 4 * MIB / LINK
    assert bound < 1 / found.steps_per_s < 1.25 * bound
    assert found.p10 <= found.steps_per_s <= found.p90
    assert found.bottleneck == "link"
    assert (found.hosts, found.workers) == (3, 3)


def test_training_with_long_computation_is_limited_by_cores() -> None:
    recording = steps(RecordedCall("allreduce", 0.15, 0.05, MIB, 0))
    alone = play(recording, MACHINES, 6, 0)
    assert 0.2 < 1 / alone.steps_per_s < 0.23
    assert alone.bottleneck == "cores of a host"
    shared = play(recording, dataclasses.replace(MACHINES, cores=1), 6, 0)
    assert 0.4 < 1 / shared.steps_per_s < 0.43
    assert shared.bottleneck == "shared cores"


def test_engines_in_a_play_use_cpu_time_per_byte() -> None:
    """Of each byte of an allreduce on two hosts, each host sends and receives one."""
    recording = steps(RecordedCall("allreduce", 0.0, 0.0, 4 * MIB, 0))
    found = play(recording, dataclasses.replace(MACHINES, byte_s=40e-9), 4, 0)
    bound = 2 * 4 * MIB * 40e-9
    assert bound < 1 / found.steps_per_s < 1.2 * bound
    assert found.bottleneck == "cores of a host"


def test_asynchronous_training_is_limited_by_the_servers_link() -> None:
    recording = steps(
        RecordedCall("pull", 0.0, 0.0001, 0, 2 * MIB),
        RecordedCall("push", 0.002, 0.0001, 2 * MIB, 0),
        name="server",
    )
    found = play(recording, dataclasses.replace(MACHINES, hosts=4), 8, 0)
    assert found.workers == 3
    assert 0.4 * LINK / (2 * MIB) < found.steps_per_s < LINK / (2 * MIB)
    assert found.bottleneck == "link"


def test_asynchronous_training_with_slow_updates_is_limited_by_the_server() -> None:
    recording = steps(
        RecordedCall("pull", 0.0, 0.0, 0, 1000), RecordedCall("push", 0.01, 0.05, 1000, 0),
        name="server",
    )  # fmt: skip
    found = play(recording, dataclasses.replace(MACHINES, hosts=4), 8, 0)
    assert 1 / 0.058 < found.steps_per_s < 1 / 0.05
    assert found.bottleneck == "server"
    assert found.busy["link"] < 0.1


def test_play_with_equal_seeds_gives_equal_percentiles() -> None:
    calls = [RecordedCall("allreduce", seconds, 0.0, 1000, 0) for seconds in (0.01, 0.01, 0.05)]
    recording = RecordedTraining("", tuple((call,) for call in calls))
    first, again = (play(recording, MACHINES, 20, 1) for _ in range(2))
    assert first == again
    assert first.p10 == pytest.approx(1 / 0.05, rel=0.1)
    assert first.p90 == pytest.approx(1 / 0.01, rel=0.1)
    assert first.p10 < first.steps_per_s < first.p90
    assert play(recording, MACHINES, 20, 2) != first


def test_play_with_a_failed_worker_raises_not_played() -> None:
    recording = steps(RecordedCall("no such call", 0.0, 0.0, 8, 0))
    with pytest.raises(playing.NotPlayed, match="no such call"):
        play(recording, MACHINES, 2, 0)


# ---- the command


def test_predict_command_prints_and_writes_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path / "run.json", [("allreduce g", MIB)] * 9)
    words = ["--hosts", "2,3", "--bandwidth", "100Mbit", "--steps", "3", "--cpu-per-gb", "1"]
    out = tmp_path / "rows.json"
    assert main.main(["predict", str(file), *words, "--cores", "2", "--json", str(out)]) == 0
    first, head, *rows = capsys.readouterr().out.splitlines()
    assert first == (
        "8 recorded steps of synchronous training, 1.25 ms each with one worker; links of "
        "100Mbit/s, 1.00 s of CPU per GB transferred"
    )
    assert head.split() == ["hosts", "workers", "steps/s", "p10", "p90", "bottleneck"]
    assert [row.split()[:2] for row in rows] == [["2", "2"], ["3", "3"]]
    assert all("link" in row and "shared cores" in row for row in rows)
    written = json.loads(out.read_text())
    assert written["mode"] == "synchronous"
    bound = MIB / (12.5e6 * 1448 / 1538)
    assert bound < 1 / written["rows"][0]["steps_per_s"] < 1.3 * bound


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hosts", "1"], "--hosts='1' is not allowed"),
        (["--bandwidth", "fast"], "--bandwidth='fast' is not allowed"),
        (["--latency", "1h"], "--latency='1h' is not allowed"),
        (["--latency", "5"], "--latency='5' is not allowed: use at most 500ms"),
        (["--server", "weights"], "no calls of the actor 'weights'"),
    ],
)
def test_predict_command_with_wrong_options_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = trace(tmp_path / "run.json", [("allreduce g", MIB)] * 9)
    assert main.main(["predict", str(file), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_predict_command_with_a_missing_file_prints_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["predict", str(tmp_path / "run.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file" in line


def test_predict_command_with_too_large_arrays_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = trace(tmp_path / "run.json", [("allreduce g", 1 << 50)] * 9)
    assert main.main(["predict", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--hosts: simulating 2 hosts may take" in line
