"""User code closes file descriptors that are not its own, as code that makes daemons does."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hoplite_mp
from tests.support.functions import add
from tests.support.processes import Program
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

ALL = 1 << 13  # more than a process of ours may open


def close_all(last: int = ALL) -> int:
    os.closerange(3, last)
    return os.getpid()


def close_once(path: str) -> str:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return "second time"
    close_all()
    return "first time"


def close_and_stay() -> None:
    close_all()
    time.sleep(600)


def close_and_leave_a_child() -> None:
    """The child keeps the descriptors of this worker open."""
    if os.fork() == 0:
        with contextlib.suppress(BaseException):
            time.sleep(600)
        os._exit(0)
    close_all()


def close_and_take_their_numbers(path: str, then: str) -> None:
    """Then speaks to the node, or waits, which wakes the node: neither may write into this file."""
    close_all()
    own = os.open(path, os.O_CREAT | os.O_RDWR | os.O_APPEND)
    while own < 2048:
        own = os.dup(own)
    cluster = hoplite_mp.current()
    if then == "puts":
        cluster.put(np.zeros(1_000_000))
    else:
        cluster.submit(time.sleep, 0.3).result(PATIENCE_S)


@pytest.mark.parametrize("task", [close_all, close_and_stay, close_and_leave_a_child])
def test_the_task_counts_as_a_death_and_no_other(task: object) -> None:
    with hoplite_mp.Cluster(1, memory="64MiB") as cluster:
        once = cluster.options(retries=0)
        futures = [once.submit(task), *(once.submit(add, i) for i in range(50))]
        with pytest.raises(hoplite_mp.WorkerLostError, match="lost its connection") as caught:
            futures[0].result(PATIENCE_S)
        assert "closed file descriptors" in str(caught.value)
        assert "memory=" not in str(caught.value)
        assert [future.result(PATIENCE_S) for future in futures[1:]] == list(range(50))
        assert cluster.submit(np.sum, np.ones(100_000)).result(PATIENCE_S) == 100_000
        assert cluster.stats()["workers_lost"] == 1


def test_it_is_tried_again(tmp_path: Path) -> None:
    with hoplite_mp.Cluster(1, memory="64MiB") as cluster:
        path = str(tmp_path / "once")
        assert cluster.submit(close_once, path).result(PATIENCE_S) == "second time"


@pytest.mark.parametrize("then", ["puts", "waits"])
def test_nothing_is_written_into_files_that_got_the_numbers(tmp_path: Path, then: str) -> None:
    with hoplite_mp.Cluster(2, memory="64MiB") as cluster:
        path = tmp_path / "file"
        once = cluster.options(retries=0)
        with pytest.raises(hoplite_mp.WorkerLostError, match="closed file descriptors"):
            once.submit(close_and_take_their_numbers, str(path), then).result(PATIENCE_S)
        assert path.read_bytes() == b""


def test_a_few_hundred_are_not_in_the_way() -> None:
    with hoplite_mp.Cluster(1, memory="64MiB") as cluster:
        first = cluster.options(retries=0).submit(close_all, 300).result(PATIENCE_S)
        assert cluster.submit(os.getpid).result(PATIENCE_S) == first
        assert cluster.stats()["workers_lost"] == 0


def test_an_initializer_that_closes_them() -> None:
    config = hoplite_mp.Config(restart_pause_s=0.01)
    with hoplite_mp.Cluster(0, memory="64MiB", config=config) as cluster:
        pool = cluster.executor(1, initializer=close_all)
        with pytest.raises(hoplite_mp.WorkerLostError, match="closed file descriptors"):
            pool.submit(add, 1).result(PATIENCE_S)


DRIVER = """
    cluster = hoplite_mp.Cluster(1, memory="64MiB")
    assert cluster.submit(abs, -1).result(30) == 1
    waits = cluster.submit(time.sleep, 600)
    threading.Timer(0.2, os.closerange, (3, 1 << 13)).start()
    try:
        waits.result(30)
    except hoplite_mp.NodeLostError as error:
        say(error)
    own = [os.dup(1) for _ in range(20)]
    for call in (lambda: cluster.submit(abs, -1).result(30), lambda: cluster.put(np.zeros(10**6)),
                 cluster.stats):
        try:
            call()
        except hoplite_mp.HopliteError as error:
            say(type(error).__name__)
    cluster.shutdown()
    assert all(os.fstat(fd) for fd in own)
    say("over")
"""


def test_a_driver_that_closes_its_own() -> None:
    out, err = Program(DRIVER).end(within=40)
    lines = out.splitlines()
    assert "node" in lines[0]
    assert lines[1:] == ["NodeLostError"] * 3 + ["over"]
    assert "Traceback" not in err


def test_a_driver_keeps_its_cluster_when_few_are_closed() -> None:
    body = """
        with hoplite_mp.Cluster(1, memory="64MiB") as cluster:
            os.closerange(3, 256)
            say(cluster.submit(abs, -1).result(30), cluster.get(cluster.put(np.ones(10**6))).sum())
    """
    assert Program(body).end()[0] == "1 1000000.0\n"
