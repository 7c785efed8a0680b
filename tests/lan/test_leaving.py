"""Nodes that leave while work runs: nothing is lost that could be saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.lan.test_cluster import PATIENCE_S, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


WAIT_FOR_ALL = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
there = [n for n in c.nodes if n.host == "h3" and n.workers][0]
"""


def test_a_node_leaves_while_work_runs(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
def work(i):
    time.sleep(0.05)
    return np.full(1 << 17, i), os.uname().nodename
futures = [c.submit(work, i) for i in range(60)]
big = [c.options(node=there).submit(np.full, 1 << 18, i) for i in range(4)]
c.wait(big)
placed = c.allreduce(big, to=there)
c.wait(placed)
assert c.locations(placed) == [there.id]
c.remove_node(there)
assert there.id not in [node.id for node in c.nodes]
got = [f.result() for f in futures]
assert [int(array[-1]) for array, _ in got] == list(range(60))
assert [int(f.result()[0]) for f in big] == [0, 1, 2, 3]
assert int(c.get(placed)[0]) == 6
assert c.stats()["tasks_retried"] == 0
names = set(c.map(lambda i: os.uname().nodename, range(8)))
print(sorted({name for _, name in got}), sorted(names))
""",
    )
    before, after = out.strip().split("] [")
    assert "h3" in before
    assert "h3" not in after
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    assert cluster.end() == [0, 0, 0]


def test_what_runs_there_is_run_to_its_end(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import pathlib, tempfile
begun = pathlib.Path(tempfile.mkdtemp()) / "begun"  # hosts share the disk
def long():
    begun.touch()
    inner = hoplite_mp.current().submit(time.sleep, 1.0)
    inner.result()
    return np.ones(1 << 18)
future = c.options(node=there, retries=0).submit(long)
while not begun.exists():  # one that has only been sent there is given back
    time.sleep(0.01)
c.remove_node(there.id)
assert future.done()
print(float(future.result().sum()))
""",
    )
    assert out == f"{float(1 << 18)}\n"
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    # Another one comes in its place.
    again = cluster.join(lan[2], 1)
    out = cluster.run(lan[1], WAIT_FOR_ALL + "print(there.workers)")
    assert out == "1\n"
    assert cluster.end() == [0, 0, 0]
    assert again.wait(PATIENCE_S) == 0


@pytest.mark.soak
def test_who_cannot_leave(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False, workers=0)
    out = cluster.run(
        lan[1],
        """
own = c.locations(c.put(1))[0]
deadline = time.monotonic() + 30
while len(c.nodes) < (3 if c._host.attached else 4) and time.monotonic() < deadline:
    time.sleep(0.02)
for node in (c.nodes[0], own, "h99", None, []):
    try:
        c.remove_node(node)
    except ValueError as error:
        print(error)
print(len(c.nodes) - (not c._host.attached))
""",
    )
    lines = out.splitlines()
    assert "manager" in lines[0]
    assert "shutdown()" in lines[1]
    assert "h99" in lines[2]
    assert len(lines) == 6
    assert lines[-1] == "3"
    assert cluster.end() == [0, 0, 0]
