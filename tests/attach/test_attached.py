"""A driver that attaches behaves like the driver of a one-host cluster, beside others."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

import hoplite_mp
from hoplite_mp._cli import main
from tests.support.clusters import PATIENCE_S
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.clusters import LoopbackCluster


def test_it_is_one_client_more(own_up: LoopbackCluster) -> None:
    own_up.attach().shutdown()  # what is imported once is not what attaching costs
    children = set(psutil.Process().children(recursive=True))
    begun = time.process_time()
    with own_up.attach() as c:
        assert time.process_time() - begun < 0.5
        assert set(psutil.Process().children(recursive=True)) <= children  # one may just end
        (node,) = c.nodes
        assert node.workers == 2
        big = c.put(np.arange(200_000.0))
        assert c.locations(big) == [node.id]
        assert c.submit(np.sum, big).result() == np.arange(200_000.0).sum()
        made = c.submit(np.ones, 200_000)
        assert not made.result().flags.writeable
        assert c.locations(made) == [node.id]
        assert list(c.map(pow, range(20), [2] * 20)) == [i * i for i in range(20)]
        total = c.reduce([c.submit(np.full, 1000, float(i)) for i in range(4)], num=3)
        assert c.get(total).shape == (1000,)
        assert len(total.contributors or ()) == 3
        with c.executor(1, initializer=os.putenv, initargs=("A", "b")) as own:
            assert own.submit(os.getppid).result() in psutil.pids()
        assert c.address == own_up.address
        c.add_workers(1)
        assert c.nodes[0].workers == 3
        eventually(lambda: c.stats()["tasks_done"] >= 26, "not all tasks are counted")
        with pytest.raises(ValueError, match="own node"):
            c.remove_node(node)
    with pytest.raises(hoplite_mp.ClosedError):
        c.put(1)
    with own_up.attach() as c:  # the node lives on
        assert c.submit(abs, -3).result() == 3
        # That of the executor may still be ending.
        eventually(lambda: c.nodes[0].workers == 3, "its workers are not those of before")


def test_groups_of_drivers_and_tasks(up: LoopbackCluster) -> None:
    def member(rank: int) -> float:
        group = hoplite_mp.current().group("sum", 4, rank)
        return float(group.allreduce(np.full(1000, float(rank)))[0])

    other = up.driver(
        """
        group = c.group("sum", 4, 3)
        print(float(group.allreduce(np.full(1000, 3.0))[0]), flush=True)
        """
    )
    with up.attach() as c:
        tasks = [c.submit(member, rank) for rank in range(2)]
        group = c.group("sum", 4, 2)
        assert float(group.allreduce(np.full(1000, 2.0))[0]) == 6.0
        group.close()
        assert [task.result() for task in tasks] == [6.0, 6.0]
    assert other.communicate(timeout=PATIENCE_S)[0] == "6.0\n"
    assert other.returncode == 0


MIXED = """
number = {number}
count = 0
seen = []
def step(i):
    global count
    count += 1
    seen.append(number)
    return number, count, sorted(set(seen)), os.getcwd()
print("ready", flush=True)
sys.stdin.readline()
found = [c.submit(step, i).result() for i in range(40)]
assert [f[0] for f in found] == [number] * 40
assert [f[1] for f in found] == list(range(1, 41)), found
assert {{tuple(f[2]) for f in found}} == {{(number,)}}
print(found[0][3], os.getcwd())
"""


def test_two_drivers_at_once_do_not_mix(
    make_up: Callable[..., LoopbackCluster], tmp_path: Path
) -> None:
    """The same names in `__main__`, one worker for both, other working directories."""
    up = make_up(1)
    folders = [tmp_path / name for name in ("first", "second")]
    drivers = []
    for number, folder in enumerate(folders):
        folder.mkdir()
        drivers.append(up.driver(MIXED.format(number=number), folder))
    for driver in drivers:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
    for driver in drivers:
        assert driver.stdin is not None
        driver.stdin.write("go\n")
        driver.stdin.flush()
    for driver, folder in zip(drivers, folders, strict=True):
        # Workers are where the process is that made the host's node.
        assert driver.communicate(timeout=PATIENCE_S)[0] == f"{tmp_path} {folder}\n"
        assert driver.returncode == 0


def test_two_clusters_on_one_host(make_up: Callable[..., LoopbackCluster]) -> None:
    ups = [make_up(1), make_up(3)]
    assert len(ups[0].names()) == 2
    with ups[1].attach() as three, ups[0].attach() as one:
        assert [one.nodes[0].workers, three.nodes[0].workers] == [1, 3]
        assert one.submit(os.getppid).result() != three.submit(os.getppid).result()
        ref = three.put(np.ones(1000))
        assert three.get(three.submit(np.sum, ref).ref) == 1000


def test_who_wants_workers_gets_a_node_of_its_own(up: LoopbackCluster) -> None:
    with up.attach(workers=1, memory="64MiB") as c:
        assert len(c.nodes) == 2
        with up.attach() as d:  # to the one of `up`: this one goes with its program
            assert d.locations(d.put(np.ones(1000))) == [d.nodes[0].id]
            assert len(d.nodes) == 2


def test_status_shows_the_node_that_it_attaches_to(
    own_up: LoopbackCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["status", own_up.address]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["h0"]


def test_a_program_that_listens_may_be_attached_to(
    make_up: Callable[..., LoopbackCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by itself."""
    with hoplite_mp.Cluster(1, listen="127.0.0.1:0", memory="64MiB") as c:
        assert c.address is not None
        with hoplite_mp.Cluster(address=c.address) as again:
            assert len(again.nodes) == 1
            ref = again.put(np.arange(5000.0))
            assert c.submit(np.sum, ref).result() == np.arange(5000.0).sum()
            assert hoplite_mp.current() is again
        assert c.submit(abs, -1).result() == 1


def test_a_cluster_of_one_host_has_no_name(
    make_up: Callable[..., LoopbackCluster], tmp_path: Path
) -> None:
    with hoplite_mp.Cluster(1, memory="64MiB") as c:
        assert c.submit(abs, -1).result() == 1
        assert list(tmp_path.iterdir()) == [tmp_path / "runtime"]
        assert list((tmp_path / "runtime").iterdir()) == []


TALK = """
    def talk(i):
        print("line", i)
        print("problem", i, file=sys.stderr)
        print("no end", i, end="")
        return os.getpid()
    c.wait([c.submit(talk, i) for i in range(3)])
"""


def test_what_tasks_print_appears_at_their_driver(up: LoopbackCluster) -> None:
    """Of two drivers on one node each gets its own lines, also those without an end."""
    made = [up.driver(TALK.replace("line", name), err=True) for name in ("one", "two")]
    said = [process.communicate(timeout=PATIENCE_S) for process in made]
    for name, (out, err) in zip(("one", "two"), said, strict=True):
        lines = [line.split(") ", 1) for line in out.splitlines()]
        assert {label.split("@")[1] for label, _ in lines} == {"h0"}
        whole = "|".join(line for _, line in lines)
        assert all(f"{name} {i}" in whole and f"no end {i}" in whole for i in range(3)), out
        assert "two" not in out or name == "two"
        assert sorted(line.split(") ")[1] for line in err.splitlines()) == [
            f"problem {i}" for i in range(3)
        ]


OWN_MAIN = """
import asyncio, enum, pickle, __main__
class Color(enum.Enum):
    RED = {number}
class Config:
    number = {number}
constant = {number}
def by_name():
    same = pickle.loads(pickle.dumps(Color.RED)) is Color.RED
    return same, type(pickle.loads(pickle.dumps(Config()))).number, sys.modules["__main__"].constant
async def for_a_while():
    found = set()
    for _ in range(20):
        found.add(by_name())
        await asyncio.sleep(0.005)
    return found
print("ready", flush=True)
sys.stdin.readline()
dumped = pickle.dumps(Config())
for _ in range(5):
    tasks = [c.submit(by_name) for _ in range(5)]
    tasks += [c.submit(pickle.loads, dumped) for _ in range(5)]
    waiting = [c.submit(for_a_while) for _ in range(3)]
    for task in tasks:
        found = task.result()
        assert found == (True, {number}, {number}) or found.number == {number}, found
    assert [task.result() for task in waiting] == [{{(True, {number}, {number})}}] * 3
print("done")
"""


def test_each_driver_has_its_own_main_in_shared_worker(
    make_up: Callable[..., LoopbackCluster],
) -> None:
    up = make_up(1)
    drivers = [up.driver(OWN_MAIN.format(number=number)) for number in (1, 2)]
    for driver in drivers:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
    for driver in drivers:
        assert driver.stdin is not None
        driver.stdin.write("go\n")
        driver.stdin.flush()
    for driver in drivers:
        assert driver.communicate(timeout=PATIENCE_S)[0] == "done\n"
        assert driver.returncode == 0
