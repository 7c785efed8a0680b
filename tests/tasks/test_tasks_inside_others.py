"""Tasks that a waiting worker runs in place: their deaths, and the end of those that wait."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from pathlib import Path


# A worker that is slow to end what was cancelled is not killed.
PATIENT = hoplite_mp.Config(cancel_grace_s=PATIENCE_S)


def die() -> None:
    os._exit(3)


def handles(deaths: int) -> int:
    handled = 0
    for _ in range(deaths):
        try:
            hoplite_mp.current().options(retries=0).submit(die).result()
        except hoplite_mp.WorkerLostError:
            handled += 1
    return handled


def sleeps(begun: Path) -> int:
    """For long only when it runs for the first time."""
    first = not begun.exists()
    with begun.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(600.0 if first else 0.0)
    return 7


def waits(folder: Path, retries: int) -> None:
    child = hoplite_mp.current().options(retries=retries).submit(sleeps, folder / "begun")
    try:
        child.result()
    finally:
        (folder / "tidied").write_text(str(os.getpid()))


def hands_on(folder: Path) -> None:
    try:
        hoplite_mp.current().submit(waits, folder, 1).result()
    finally:
        (folder / "tidied outside").touch()


def test_a_task_survives_the_deaths_of_those_that_it_waits_for() -> None:
    """The first one may take it along. It is tried again, and then runs none of them itself."""
    with hoplite_mp.Cluster(workers=2) as c:
        assert c.submit(handles, 3).result(timeout=60) == 3


@pytest.mark.parametrize("retries", [0, 1])
def test_a_cancelled_task_that_waits_is_interrupted(tmp_path: Path, retries: int) -> None:
    """Its worker lives, and what it ran in place is run again if it may be."""
    with hoplite_mp.Cluster(workers=1, config=PATIENT) as c:
        future = c.submit(waits, tmp_path, retries)
        begun = tmp_path / "begun"
        eventually(lambda: begun.exists() and begun.read_text())
        assert future.cancel(force=True)
        eventually(lambda: (tmp_path / "tidied").exists() and (tmp_path / "tidied").read_text())
        inside = begun.read_text().split()[0] == (tmp_path / "tidied").read_text()
        if retries and inside:  # else another worker has taken it first
            eventually(lambda: len(begun.read_text().split()) == 2)
        assert c.submit(os.getpid).result(timeout=60)
        assert c.stats()["workers_lost"] == 0


def test_all_tasks_inside_a_cancelled_one_are_interrupted(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=1, config=PATIENT) as c:
        future = c.submit(hands_on, tmp_path)
        eventually((tmp_path / "begun").exists)
        assert future.cancel(force=True)
        eventually((tmp_path / "tidied outside").exists)
        assert (tmp_path / "tidied").exists()


def nested(folder: Path) -> int:
    if not (folder / "died").exists():
        (folder / "died").touch()
        os._exit(3)
    return hoplite_mp.current().submit(abs, -7).result()


def test_a_worker_without_a_stand_in_runs_them_also_when_tried_again(tmp_path: Path) -> None:
    config = hoplite_mp.Config(blocked_workers_max=0)
    with hoplite_mp.Cluster(workers=1, config=config) as c:
        assert c.submit(nested, tmp_path).result(timeout=60) == 7
