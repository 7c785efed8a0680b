"""Table, JSON and picture from made-up runs."""

from __future__ import annotations

import json

import pytest

from hoplite_mp._cli.demo import main
from hoplite_mp._cli.demo.training import TrainingPlan, TrainingRun


def a_run(name: str, accuracy: float, kill: bool = True) -> TrainingRun:
    steps = [0.01] * 20
    steps[10] = 0.06
    return TrainingRun(
        name=name,
        seconds=sum(steps),
        startup_seconds=0.4,
        step_seconds=steps,
        times=[0.0, 0.1, 0.25],
        accuracies=[0.1, 0.7, accuracy],
        contributors=[20, 20],
        staleness=[0, 1] * 20,
        bytes_moved={"copied": 2_000_000_000, "made_in_place": 3_000_000_000},
        kill_step=10 if kill else None,
        killed_pid=4711 if kill else None,
        happened="1 worker replaced" if kill else "no worker was killed",
    )


@pytest.fixture(name="ours")
def fixture_ours() -> TrainingRun:
    return a_run("hoplite_mp", 0.9722)


@pytest.fixture(name="pool")
def fixture_pool() -> TrainingRun:
    return a_run("ProcessPoolExecutor", 0.9)


def test_table(ours, pool):
    text = main.results(ours, pool)
    for part in (
        "hoplite_mp",
        "ProcessPoolExecutor",
        "97.2%",
        "90.0%",
        "80.0",  # steps per second
        "2.00 GB copied once",
        "3.00 GB made in place",
        "50.0 ms",  # lost at the kill
        "1 worker replaced",
    ):
        assert part in text


def test_table_without_a_kill():
    text = main.results(a_run("a", 0.97, kill=False), a_run("b", 0.97, kill=False))
    assert "no worker was killed" in text
    assert "50.0 ms" not in text


def test_verdict(ours, pool):
    assert main.verdict(ours) is None
    complaint = main.verdict(pool)
    assert complaint is not None
    assert "90.0%" in complaint
    assert "95%" in complaint
    assert "\n" not in complaint


def test_files(ours, pool, tmp_path):
    main.write(tmp_path, TrainingPlan(workers=2, steps=20), ours, pool)
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["accuracy"] == 0.9722
    assert result["killed_pid"] == 4711
    assert result["steps_per_s"] == pytest.approx(80)
    assert result["seconds"] == pytest.approx(0.25)
    assert result["contributors"] == [20, 20]
    assert result["workers"] == 2
    assert result["pool"]["accuracy"] == 0.9
    assert set(result["pool"]) <= set(result)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_picture_of_runs_without_a_kill():
    figure = main.picture(a_run("a", 0.97, kill=False), a_run("b", 0.97, kill=False))
    [axes] = figure.axes
    assert len(axes.get_lines()) == 3  # two curves and the wanted accuracy


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0001, "0.1 ms"), (0.0123, "12.3 ms"), (1.5, "1500 ms")]
)
def test_milliseconds(seconds, text):
    assert main.milliseconds(seconds) == text
