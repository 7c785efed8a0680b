"""Work per task does not grow with how many others wait: counted, not timed."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

import hoplite_mp
from hoplite_mp._common.ref import ObjectRef

LINKS = 1500
POLLS_PER_LINK_MAX = 25


class Counted:
    """The task table, whose looks at single objects are counted."""

    def __init__(self, tasks: Any) -> None:
        self.tasks = tasks
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tasks, name)

    def done(self, oid: int) -> bool:
        self.looks += 1
        return bool(self.tasks.done(oid))


def counted(cluster: hoplite_mp.Cluster) -> Counted:
    submitter = cluster._runtime.submitter
    found = Counted(submitter.tasks)
    submitter.tasks = submitter.waiting.tasks = found  # type: ignore[assignment]
    return found


def increment(x: int) -> int:
    return x + 1


def looks_of_chain(links: int) -> float:
    """Looks for each link of a chain that was sent from here before its first one could end."""
    cluster = hoplite_mp.current()
    tasks = counted(cluster)
    folder = Path(tempfile.mkdtemp())
    last = cluster.submit(wait_for_file, str(folder / "go"))
    for _ in range(links):
        last = cluster.submit(increment, last)
    (folder / "go").touch()
    assert last.result() == links
    shutil.rmtree(folder)
    cluster._runtime.submitter.tasks = tasks.tasks
    cluster._runtime.submitter.waiting.tasks = tasks.tasks
    return tasks.looks / links


def test_a_chain_of_the_driver() -> None:
    with hoplite_mp.Cluster(workers=2):
        assert looks_of_chain(LINKS) < POLLS_PER_LINK_MAX


@pytest.mark.parametrize("workers", [1, 2])
def test_a_chain_of_a_worker(workers: int) -> None:
    with hoplite_mp.Cluster(workers=workers) as cluster:
        assert cluster.submit(looks_of_chain, LINKS).result() < POLLS_PER_LINK_MAX


def wait_for_file(path: str) -> int:
    while not Path(path).exists():
        time.sleep(0.005)
    return 0


def needs_others(refs: hoplite_mp._common.ref.ObjectRef[Any] | Any, path: str) -> float:
    cluster = hoplite_mp.current()
    tasks = counted(cluster)
    mine = [cluster.submit(increment, ref) for ref in refs.value]
    Path(path).touch()
    assert cluster.get(mine) == [2] * len(mine)
    return tasks.looks / len(mine)


def test_what_others_own(tmp_path: Path) -> None:
    """A worker's tasks need results of the driver's, each another one."""
    path = str(tmp_path / "go")
    with hoplite_mp.Cluster(workers=3) as cluster:
        gate = cluster.submit(wait_for_file, path)
        theirs = [cluster.submit(increment, gate) for _ in range(LINKS)]
        asked = cluster.submit(needs_others, Kept([one.ref for one in theirs]), path)
        assert asked.result() < 2 * POLLS_PER_LINK_MAX


class Kept:
    """Hides refs from the look for arguments."""

    def __init__(self, value: Any) -> None:
        self.value = value


def count(*values: int) -> int:
    return len(values)


def test_a_task_that_needs_many(monkeypatch: pytest.MonkeyPatch) -> None:
    with hoplite_mp.Cluster(workers=2) as cluster:
        needed = [cluster.submit(increment, 0) for _ in range(LINKS)]
        compared = 0
        same = ObjectRef.__eq__

        def eq(self: Any, other: Any) -> Any:
            nonlocal compared
            compared += 1
            return same(self, other)

        monkeypatch.setattr(ObjectRef, "__eq__", eq)
        assert cluster.submit(count, *needed).result() == LINKS
        assert cluster.submit(count, *[one.ref for one in needed]).result() == LINKS
        assert compared < 4 * LINKS


def test_many_tasks_that_need_one(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(workers=2) as cluster:
        tasks = counted(cluster)
        first = cluster.submit(wait_for_file, str(tmp_path / "go"))
        after = [cluster.submit(lambda _: 1, first) for _ in range(LINKS)]
        (tmp_path / "go").touch()
        assert cluster.get(after) == [1] * LINKS
        assert tasks.looks / LINKS < POLLS_PER_LINK_MAX
