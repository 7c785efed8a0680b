"""Drivers on hosts of a LAN that have a node of the cluster, and on one that has none."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan, forked
from tests.support.clusters import PATIENCE_S, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(lan: Lan) -> Iterator[UpCluster]:
    third = lan.hosts.pop()
    made = UpCluster(lan, tls=True)
    lan.hosts.append(third)
    for host in (lan[0], lan[1]):
        wait_for_name(host)
    yield made
    assert made.end() == [0, 0]
    assert [names(host) for host in lan] == [[], [], []]


WAIT_FOR_BOTH = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 2 and time.monotonic() < deadline:
    time.sleep(0.02)
"""
LOOK = (
    WAIT_FOR_BOTH
    + """
import psutil
def where(i):
    time.sleep(0.02)
    return os.uname().nodename
ref = c.put(np.arange(300_000.0))
hosts = {node.id: node.host for node in c.nodes}
print(c._host.attached, [hosts[one] for one in c.locations(ref)], sorted(hosts.values()))
print(len(psutil.Process().children()))
here = [node for node in c.nodes if node.workers]
seen = set()
while len(seen) < 2 and time.monotonic() < deadline:
    seen |= set(c.map(where, range(8), chunksize=1))
print(sorted(seen))
print([float(x) for x in c.map(np.sum, [ref] * 8, chunksize=1)] == [300_000 * 299_999 / 2] * 8)
both = [c.options(node=node).submit(np.full, 300_000, 2.0) for node in here]
print(float(c.get(c.reduce(both))[7]))
"""
)


def names(host: Host) -> list[str]:
    """What drivers of that host can find."""
    return [path.name for path in host.root.glob("runtime/hoplite_mp/*")]


def wait_for_name(host: Host) -> None:
    """Until a node has joined there and can be found."""
    deadline = time.monotonic() + PATIENCE_S
    while not names(host):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_every_host_has_one_node(cluster: UpCluster, lan: Lan) -> None:
    """Also that of a driver, if it had none; names of one host are not found by another."""
    for host in lan:
        attached = host.number < 3
        with forked.executed():  # a fork has a child from which a supervisor would be forked
            out = cluster.run(host, LOOK).splitlines()
        hosts = ["h1", "h2"] if attached else ["h1", "h2", "h3"]
        assert out[0] == f"{attached} {[host.name]} {hosts}"
        assert out[1] == ("0" if attached else "1")
        assert out[2:] == ["['h1', 'h2']", "True", "4.0"]
    assert [len(names(host)) for host in lan] == [1, 1, 0]


def test_two_drivers_of_a_host_one_is_killed(cluster: UpCluster, lan: Lan) -> None:
    """Its tasks end on both hosts, what it held goes, the other one does not notice."""
    victim = """
    held = [c.put(np.full(300_000, float(i))) for i in range(5)]
    running = [c.submit(time.sleep, 600) for _ in range(12)]
    everywhere = c.broadcast(held[0]).result()
    while sum(future.running() for future in running) < 2:
        time.sleep(0.02)
    print("runs", flush=True)
    time.sleep(600)
    """
    survivor = """
    mine = c.put(np.arange(100_000.0))
    assert c.submit(abs, -1).result() == 1
    names = ("objects", "bytes_used")
    before = None
    while (now := [c.stats()[name] for name in names]) != before:
        before = now  # what the first task has left goes a little later
        time.sleep(0.3)
    print("begin", flush=True)
    sys.stdin.readline()
    assert c.stats()["objects"] > before[0]
    print("kill", flush=True)
    sys.stdin.readline()
    begun = time.monotonic()
    for node in c.nodes:
        assert c.options(node=node).submit(abs, -2).result(20) == 2
    while [c.stats()[name] for name in names] != before and time.monotonic() < begun + 20:
        time.sleep(0.05)
    after = [c.stats()[name] for name in names]
    print(after == before or f"{after}, and not {before}:", len(c.nodes))
    print(float(c.submit(np.sum, mine).result()) == c.get(mine).sum())
    """
    other = lan[1].popen(
        cluster.program(WAIT_FOR_BOTH + survivor.replace("\n    ", "\n")),
        env=cluster.env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdin is not None
    assert other.stdout.readline() == "begin\n"
    driver = lan[1].popen(
        cluster.program(victim), env=cluster.env, stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    assert driver.stdout.readline() == "runs\n"
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "kill\n"
    lan[1].signal(driver, 9)
    driver.wait(PATIENCE_S)
    out = other.communicate("\n", timeout=PATIENCE_S)[0]
    assert out == "True 2\nTrue\n"
    assert other.returncode == 0
    driver.stdout.close()


@pytest.mark.soak
def test_two_nodes_of_a_host(cluster: UpCluster, lan: Lan) -> None:
    """One of them has the name; when it goes, the other one takes it."""
    first, second = cluster.join(lan[2], 0), None
    try:
        wait_for_name(lan[2])
        second = cluster.join(lan[2], 0)
        out = cluster.run(
            lan[2],
            """
            deadline = time.monotonic() + 30
            while len(c.nodes) < 4 and time.monotonic() < deadline:
                time.sleep(0.02)
            print(c._host.attached, len(c.nodes))
            """,
        )
        assert out == "True 4\n"
        lan[2].signal(first, signal.SIGTERM)
        assert first.wait(PATIENCE_S) == 0
        out, deadline = "", time.monotonic() + PATIENCE_S
        while out != "True 3\n" and time.monotonic() < deadline:
            out = cluster.run(lan[2], "print(c._host.attached, len(c.nodes))")
        assert out == "True 3\n"
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                lan[2].signal(process, signal.SIGTERM)
                process.wait(PATIENCE_S)


@pytest.mark.soak
def test_the_node_of_a_driver_is_killed_or_leaves(lan_permitted: None) -> None:
    program = (
        WAIT_FOR_BOTH
        + """
here = [node for node in c.nodes if node.host == "h2"][0]
running = c.options(node=here).submit(time.sleep, 600)
ref = c.put(np.arange(300_000.0))
view = c.get(ref)
print(c._host.attached, flush=True)
try:
    running.result()
except hoplite_mp.NodeLostError as error:
    print(type(error).__name__)
try:
    c.submit(abs, -1).result(20)
except (hoplite_mp.NodeLostError, hoplite_mp.ClosedError) as error:
    print("not after that")
print(float(view.sum()) == 300_000 * 299_999 / 2)
"""
    )
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False)
        wait_for_name(lan[1])
        driver = lan[1].popen(
            cluster.program(program), env=cluster.env, stdout=subprocess.PIPE, text=True
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "True\n"
        lan[1].signal(cluster.joined[0], 9)
        assert driver.communicate(timeout=PATIENCE_S)[0] == "NodeLostError\nnot after that\nTrue\n"
        assert driver.returncode == 0
        assert cluster.joined[0].wait(PATIENCE_S) != 0
        assert len(names(lan[1])) == 1
        # The next one takes the name of the dead one, and drivers find it.
        cluster.joined[0] = cluster.join(lan[1], 1)
        out, deadline = "", time.monotonic() + PATIENCE_S
        while out != "True 2\n" and time.monotonic() < deadline:  # it may still be joining
            out = cluster.run(lan[1], "print(c._host.attached, len(c.nodes))")
        assert out == "True 2\n"
        assert cluster.end() == [0, 0]
        assert names(lan[1]) == []


def test_ref_of_another_host_is_read_while_an_executor_is_open(lan_permitted: None) -> None:
    """The executor's cluster is hidden: refs that pickle reads belong to the user's cluster."""
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False)
        out = cluster.run(
            lan[1],
            """
            import pickle
            while sum(node.workers for node in c.nodes) < 2:
                time.sleep(0.02)
            there = c.options(node=[n for n in c.nodes if n.host == "h1" and n.workers])
            inner = there.submit(lambda: hoplite_mp.current().put(5)).result(30)
            with hoplite_mp.Executor(1) as pool:
                assert hoplite_mp.current() is c
                print(c.get(pickle.loads(pickle.dumps(inner))), pool.submit(abs, -1).result(30))
            """,
        )
        assert out == "5 1\n"
        assert cluster.end() == [0, 0]
