"""The programs of examples/applications/ on this host, and what is measured with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from benchmarks.applications import faults, report, sgd
from benchmarks.applications.__main__ import APPLICATIONS
from benchmarks.applications.beds import SYSTEMS, Bed
from benchmarks.applications.cases import Application, Case, Comparison
from benchmarks.applications.running import Failed, run
from examples.applications import fashion_mnist
from tests.support.applications import ROOT, needs_data, needs_hosts, result_of

if TYPE_CHECKING:
    from pathlib import Path

LONG = pytest.mark.long
CASES = [case for application in APPLICATIONS for case in application.cases]


@needs_data
@pytest.mark.parametrize(
    "system",
    [
        "ours",
        *(pytest.param(name, marks=LONG) for name in sorted({*sgd.PROGRAMS.values()} - {"ours"})),
    ],
)
def test_asynchronous_sgd_learns(system: str) -> None:
    found = result_of(f"asynchronous_sgd.{system}", seconds=3.0)
    assert found["taken"] == 1
    assert len(found["steps"]) > 3
    assert found["steps"] == sorted(found["steps"])
    first, last = found["accuracy"][0][1], found["accuracy"][-1][1]
    assert last > first + 0.1


@needs_data
@pytest.mark.parametrize(
    ("system", "killed"),
    [
        ("ours", True),
        pytest.param("ray_alone", True, marks=LONG),
        pytest.param("ray_with_ours", True, marks=LONG),
        pytest.param("dask_alone", False, marks=LONG),
    ],
)
def test_an_ensemble_answers_also_when_a_replica_is_killed(system: str, killed: bool) -> None:
    found = result_of(
        f"ensemble.{system}", models=3, megabytes=1, seconds=3.0, kill_s=0.5 if killed else None
    )
    assert found["right"] > 0.7
    assert found["voters"][0] == 3
    assert (min(found["voters"]) == 2) is killed
    assert len(found["begun"]) == len(found["steps"]) == len(found["voters"])


def test_an_unknown_argument_is_one_clear_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.applications.ensemble.ours", '{"modles": 3}'],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("no argument modles; there are address, hosts,")


def test_missing_data_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fashion_mnist, "FOLDER", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="nowhere: install it, apt install dataset-fashion"):
        fashion_mnist.load("train")


# -- what is measured, and what is said of it


def test_names_are_unique_and_every_comparison_has_its_cases() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for application in APPLICATIONS:
        for one in application.comparisons:
            assert {one.ours, one.other} - {None} <= set(names), one.title
    assert {case.system for case in CASES} <= set(SYSTEMS)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_case_has_its_program(case: Case) -> None:
    path = ROOT / (case.module.replace(".", "/") + ".py")
    text = path.read_text()
    for name in {**case.arguments, **case.quick}:
        assert f"{name}=" in text, f"{path} takes no {name}"


def test_what_the_links_allow() -> None:
    assert sgd.links(8) == 3.5
    assert sgd.links(4) == 1.5


def test_the_time_without_progress() -> None:
    steps = [1.0, 2.0, 3.0, 8.0, 9.0, 30.0]
    result = {"steps": steps, "incidents": {"killed": 3.5, "revived": 10.0}}
    assert faults.pause(result) == 21.0  # the step that the new host had to be waited for, too
    assert faults.pause({**result, "steps": steps[:-1]}) == 5.0
    assert faults.pause_before(result) == 5.0
    steady = {"steps": [0.25 * number for number in range(41)]}
    assert {rate for _, rate in faults.throughput(steady)} <= {4.0, 4.25}
    assert faults.throughput(steady)[0][0] == faults.WINDOW_S / 2
    assert faults.pause({"steps": [1.0], "incidents": {"killed": 3.5, "revived": 10.0}}) == 6.5


def test_a_table_of_what_there_is(tmp_path: Path) -> None:
    comparisons = (
        Comparison("fast", "a-ours", "a-ray", lambda r: r["rate"], "1/s", 2.5, links=3.5),
        Comparison("slow", "a-ours", "a-dask", lambda r: r["rate"], "1/s", 9.0),
        Comparison("alone", "a-ours", None, lambda r: r["rate"], "s", 2.0, "<="),
        Comparison("not measured", "b-ours", "a-ray", lambda r: r["rate"], "1/s", 2.5),
    )
    usage = {
        "seconds": 10.0, "cpu_s": 5.0, "busiest_link_bytes": 600_000_000,
        "memory_peak_bytes": 10**9,
    }  # fmt: skip
    for system, rate in (("ours", 6.0), ("ray", 2.0), ("dask", 1.0)):
        found = {"label": system.title(), "rate": rate, "usage": usage, "link_bytes_per_s": 120e6}
        (tmp_path / f"a-{system}.json").write_text(json.dumps(found))
    found = report.results(tmp_path)
    lines = report.compared(found, comparisons)
    assert [line[0] for line in lines] == ["fast", "slow", "alone"]
    assert lines[0] == ("fast", "6.00 1/s", "Ray 2.00 1/s", "3.00", "≥ 2.50", "3.50", "met")
    assert lines[1][3:] == ("6.00", "≥ 9.00", "", "NOT MET")
    assert lines[2][1:] == ("6.00 s", "", "", "≤ 2.00 s", "", "NOT MET")
    assert report.used(found)[0][3:] == ("50%", "0.50", "1.00 GB")
    whole = report.printed(found, [Application("A", (), comparisons)])
    assert whole == ""  # no case of it


# -- on emulated hosts


@needs_data
@needs_hosts
@LONG
@pytest.mark.timeout(600)
@pytest.mark.parametrize("system", ["ours", "ray+ours", "ray", "dask"])
def test_a_system_on_emulated_hosts(system: str) -> None:
    module = f"{sgd.FOLDER}.{sgd.PROGRAMS[system]}"
    with Bed(system, 2, memory=256 << 20) as bed:
        found = run(bed, module, {"seconds": 3.0}, 400.0)
        root = bed.lan.root
    assert len(found["steps"]) > 1
    usage = found["usage"]
    assert usage["busiest_link_bytes"] > 5_000_000  # weights to the other host, at least once
    assert usage["cpu_s"] > 0
    assert usage["memory_peak_bytes"] > 100_000_000
    assert not root.exists()


@needs_hosts
@LONG
def test_a_program_without_a_result_says_what_it_has_said() -> None:
    with (
        Bed("none", 1) as bed,
        pytest.raises(Failed, match=r"(?s)ended without a result.*No module named .*nonsense"),
    ):
        run(bed, "examples.applications.nonsense", {}, 60.0)
    with Bed("none", 1) as bed, pytest.raises(Failed, match="no result within its time"):
        run(bed, "examples.applications.asynchronous_sgd.ours", {}, 0.2)  # it imports torch
