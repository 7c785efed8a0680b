"""Nodes that leave while work runs: nothing is lost that could be saved."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, Any

import pytest

from tests.lan import Lan
from tests.support.clusters import HOPLITE, PATIENCE_S, Driver, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


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
def put_there():
    return hoplite_mp.current().put(np.full(1 << 18, 9))
inner = c.options(node=there).submit(put_there).result()
assert c.locations(inner) == [there.id]
c.remove_node(there)
assert there.id not in [node.id for node in c.nodes]
got = [f.result() for f in futures]
assert [int(array[-1]) for array, _ in got] == list(range(60))
assert [int(f.result()[0]) for f in big] == [0, 1, 2, 3]
assert int(c.get(placed)[0]) == 6
assert int(c.get(inner)[0]) == 9
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
    inner = hoplite_mp.current().submit(time.sleep, 0.5)
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


def test_actors_there_finish_the_calls_made_so_far(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import pathlib, tempfile, threading
class Notes:
    def __init__(self):
        self.seen = []
    def note(self, what, seconds=0.0):
        time.sleep(seconds)
        self.seen.append(what)
        return len(self.seen)
    def where(self):
        return os.uname().nodename
gate = pathlib.Path(tempfile.mkdtemp()) / "gate"  # hosts share the disk
def slowly(value):
    while not gate.exists():
        time.sleep(0.01)
    return value
actor = c.options(node=there, name="notes").actor(Notes)
assert actor.where().result(30) == "h3"
futures = [actor.note(i, 0.01) for i in range(100)]
futures.append(actor.note(c.submit(slowly, "pending")))
futures += [actor.note(i) for i in range(10)]
leaving = threading.Thread(target=c.remove_node, args=(there,))
leaving.start()
refused = None
while refused is None:
    try:
        futures.append(actor.note("later"))
    except hoplite_mp.ActorLostError as error:
        refused = error
    else:
        if futures[-1].done() and futures[-1].exception() is not None:
            refused = futures.pop().exception()
    time.sleep(0.001)
assert leaving.is_alive()
print(type(refused).__name__, refused)
again = c.options(name="notes", node=c.nodes[0]).actor(Notes)  # its name is free
assert again.note("first").result(30) == 1
gate.touch()
leaving.join(60)
assert [f.result(0) for f in futures] == list(range(1, len(futures) + 1))
print(type(actor.note(0).exception(30)).__name__)
""",
    )
    first, second = out.splitlines()
    assert first.startswith("ActorLostError")
    assert "leaving" in first
    assert second == "ActorLostError"
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    assert cluster.end() == [0, 0, 0]


def test_what_begins_while_a_node_leaves(lan: Lan) -> None:
    """What is bound to it cannot; an actor of its own driver, or of several nodes, is elsewhere."""
    cluster = UpCluster(lan, tls=False)
    program = """
import pathlib, tempfile, threading
gate = pathlib.Path(tempfile.mkdtemp()) / "gate"  # hosts share the disk
class Where:
    def until(self, path):
        while not path.exists():
            time.sleep(0.01)
    def where(self):
        return os.uname().nodename
first = next(n for n in c.nodes if n.host == "h1" and n.workers)
held = c.options(node=there).actor(Where)
waits = held.until(gate)
print("all are there", flush=True)
input()
leaving = threading.Thread(target=c.remove_node, args=(there,))
leaving.start()
while next(n for n in c.nodes if n == there or n.id == there.id).workers:
    time.sleep(0.01)
for make in (
    lambda: c.options(node=there),
    lambda: c.options(node=there).actor(Where),
    lambda: c.options(node=there).submit(abs, -1),
):
    try:
        make()
    except hoplite_mp.NodeLostError as error:
        print(error)
print({either.actor(Where).where().result(30) for _ in range(3)})
print("leaving", flush=True)
input()
gate.touch()
leaving.join(60)
"""
    before = "either = c.options(node=[there, next(n for n in c.nodes if n.host == 'h1')])"
    on_it = """
own = c.actor(type("Own", (), {"where": lambda self: os.uname().nodename}))
print(own.where().result(30), flush=True)
input()
own = c.actor(type("Own", (), {"where": lambda self: os.uname().nodename}))
print(own.where().result(30) in ("h1", "h2"), flush=True)
"""
    with Driver(cluster, lan[1], WAIT_FOR_ALL + before + program) as driver:
        assert driver.hear() == "all are there"
        with Driver(cluster, lan[2], on_it) as there:
            assert there.hear() == "h3"
            driver.say()
            for _ in range(3):
                assert re.fullmatch(r"node 'h\d' is leaving the cluster", driver.hear())
            assert driver.hear() == "{'h1'}"
            assert driver.hear() == "leaving"
            there.say()
            assert there.hear() == "True"
        driver.say()
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    assert cluster.end() == [0, 0, 0]


@pytest.mark.soak
def test_a_driver_there_that_goes_on_sending_holds_up_nobody(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    begun = lan[0].root / "sends"
    sender = f"""
import pathlib
def work(i):
    time.sleep(0.01)
    return i
ahead = [c.submit(work, i) for i in range(200)]
pathlib.Path({str(begun)!r}).touch()
try:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        ahead.append(c.submit(work, 0))
        ahead.pop(0).result()
    print("still there")
except hoplite_mp.NodeLostError:
    print("lost")
"""
    cluster.run(lan[1], WAIT_FOR_ALL)  # its host has a node by now, to which it attaches
    found: list[str] = []
    driver = threading.Thread(target=lambda: found.append(cluster.run(lan[2], sender)))
    driver.start()
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + f"""
while not os.path.exists({str(begun)!r}):
    time.sleep(0.01)
c.remove_node(there)
print("left")
""",
    )
    driver.join(PATIENCE_S)
    assert out == "left\n"
    assert found == ["lost\n"]
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    assert cluster.end() == [0, 0, 0]


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


REMOVED = """
import collections, threading
class Counter:
    def add(self, n):
        return n
actor = c.actor(Counter)
pool = c.executor(1)
assert actor.add(1).result(30) == 1 and pool.submit(abs, -2).result(30) == 2
one = c.put(5)
array = c.put(np.ones(1 << 18))
group = c.group("removed", 2, 0)
# A node that leaves does not wait for what its drivers submit meanwhile; so some is pending then.
bound = c.options(node=c.nodes[0])
under_way = collections.deque(bound.submit(time.sleep, 0.2) for _ in range(3))
def send():
    try:
        while True:
            under_way.append(bound.submit(time.sleep, 0.2))
            under_way[0].result(30)
            under_way.popleft()
    except hoplite_mp.NodeLostError:
        pass
sender = threading.Thread(target=send)
sender.start()
print(c.here.id, flush=True)
input()
sender.join(30)
calls = {
    "submit": lambda: c.submit(abs, -2).result(30),
    "pending": lambda: under_way[-1].result(30),
    "put": lambda: c.put(1),
    "put large": lambda: c.put(np.ones(1 << 18)),
    "empty": lambda: c.empty(1 << 18),
    "get": lambda: c.get(c.submit(abs, -1)),
    "map": lambda: list(c.map(abs, [1])),
    "run": lambda: c.run(os.getpid),
    "stream": lambda: list(c.stream(lambda: (yield 1))),
    "reduce": lambda: c.get(c.reduce([one, one])),
    "broadcast": lambda: c.broadcast(one).result(30),
    "nodes": lambda: c.nodes,
    "here": lambda: c.here,
    "stats": lambda: c.stats(),
    "locations": lambda: c.locations(array),
    "actor": lambda: c.actor(Counter).add(1).result(30),
    "call": lambda: actor.add(1).result(30),
    "get_actor": lambda: c.get_actor("none"),
    "executor": lambda: c.executor(1).submit(abs, -1).result(30),
    "pool": lambda: pool.submit(abs, -1).result(30),
    "spmd": lambda: c.spmd(abs, 1)[0].result(30),
    "group": lambda: group.barrier(),
    "new group": lambda: c.group("another", 1, 0).barrier(),
    "add_workers": lambda: c.add_workers(1),
    "remove_node": lambda: c.remove_node("h0"),
    "queue": lambda: hoplite_mp.Queue().put(1),
}
for name, call in calls.items():
    try:
        print(name, "gave", call())
    except Exception as error:
        text = str(error)
        told = "was removed from it by remove_node()" in text and "again to continue" in text
        print(f"{name}: {type(error).__name__} {'told' if told else text}")
print(int(c.get(one)), int(c.get(array)[-1]))
"""


@pytest.mark.parametrize("attaches", [True, False], ids=["attached", "own node"])
def test_driver_of_a_removed_node_says_so_in_every_call(lan: Lan, attaches: bool) -> None:
    cluster = UpCluster(lan, tls=False, attaches=attaches)
    cluster.run(lan[1], WAIT_FOR_ALL)
    with Driver(cluster, lan[2], REMOVED) as driver:
        name = driver.hear()
        cluster.run(lan[1], f"c.remove_node({name!r})")
        driver.say()
        lines = driver.process.communicate(timeout=PATIENCE_S)[0].splitlines()
    assert lines[-1] == "5 1"  # what was here stays readable
    assert len(lines) == 27
    assert [line for line in lines[:-1] if not line.endswith(": NodeLostError told")] == []
    if attaches:
        assert cluster.joined[1].wait(PATIENCE_S) == 0
    assert cluster.end() == [0, 0, 0]


def status(cluster: UpCluster) -> dict[str, Any]:
    """What `hoplite-mp status --json` says on the first host."""
    told = cluster.lan[0].run(
        [*HOPLITE, "status", cluster.address, "--no-tls", "--json"],
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    return dict(json.loads(told.stdout))


def test_status_counts_tasks_traffic_of_groups_and_hosts_that_left(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    program = """
nodes = {n.host: n for n in c.nodes if n.workers}
def peer(rank):
    group = hoplite_mp.current().group("traffic", 2, rank)
    for i in range(100):
        group.sendrecv(np.ones(1000), 1 - rank, source=1 - rank)
before = c.stats()["bytes_sent"]
c.wait([c.options(node=nodes[f"h{rank + 1}"]).submit(peer, rank) for rank in range(2)])
print(c.stats()["bytes_sent"] - before > 1_600_000, flush=True)
futures = [c.options(node=nodes["h2"]).submit(time.sleep, 120) for _ in range(5)]
print(nodes["h2"].id, flush=True)
input()
for future in futures:
    future.cancel(force=True)
"""
    with Driver(cluster, lan[0], WAIT_FOR_ALL + program) as driver:
        assert driver.hear() == "True"
        name = driver.hear()

        def counted() -> bool:
            """A task is queued at the node that keeps it until the other node runs it."""
            found = {node["id"]: node for node in status(cluster)["nodes"]}
            running, queued = (
                sum(n[what] for n in found.values()) for what in ("running", "queued")
            )
            return found[name]["running"] == running > 0 and running + queued == 5

        eventually(counted, within=PATIENCE_S)
        driver.say()
    assert status(cluster)["gone"] == []
    lan[2].signal(cluster.joined[1], signal.SIGTERM)
    assert cluster.joined[1].wait(PATIENCE_S) == 0
    eventually(lambda: status(cluster)["gone"], within=PATIENCE_S)
    (gone,) = status(cluster)["gone"]
    assert (gone["host"], gone["how"]) == ("h3", "left")
    assert cluster.end() == [0, 0, 0]
