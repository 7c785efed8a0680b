"""Executors and spmd whose workers are on other hosts."""

from __future__ import annotations

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL


def test_an_executor_on_another_host(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import tempfile
def begin(word, array):
    globals()["word"], globals()["total"] = word, float(array.sum())
def look(i):
    return word, total, os.uname().nodename, os.getpid()
before = sum(n.workers for n in c.nodes)
big = np.ones(1 << 18)
with c.executor(2, node=there, initializer=begin, initargs=("hello", big)) as e:
    found = list(e.map(look, range(40)))
    assert {f[:3] for f in found} == {("hello", float(1 << 18), "h3")}
    array = e.submit(np.full, 1 << 18, 7.0).result()
    assert float(array.sum()) == 7.0 * (1 << 18)
    print(e.submit(os.uname).result().nodename)
assert sum(n.workers for n in c.nodes) == before
with c.executor(4, node=[n for n in c.nodes if n.workers], max_tasks_per_child=3) as e:
    folder = tempfile.mkdtemp()  # hosts share the disk
    def meet(i):
        open(f"{folder}/{os.uname().nodename}", "w").close()
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)
        return os.uname().nodename, os.getpid()
    found = list(e.map(meet, range(36), chunksize=1))
    assert {name for name, _ in found} == {"h1", "h2", "h3"}
    assert max(found.count(one) for one in found) <= 3
def fail():
    raise OSError("no licence here")
with c.executor(1, node=there, initializer=fail) as e:
    error = e.submit(abs, -1).exception(30)
    print(type(error).__name__, "no licence here" in str(error))
future = c.executor(1, node=there, max_tasks_per_child=1)
died = future.submit(os._exit, 3)
print(type(died.exception(30)).__name__)
future.shutdown()
print(c.submit(abs, -2).result())
""",
    )
    assert out.splitlines() == ["h3", "WorkerLostError True", "WorkerLostError", "2"]


def test_peers_on_all_hosts(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
def peer(rank, size, word):
    with hoplite_mp.current().group(word, size, rank, timeout=30) as g:
        total = g.allreduce(np.full(1 << 16, rank, np.float32))
        names = g.allgather(np.frombuffer(os.uname().nodename.encode(), np.uint8))
    return float(total[0]), sorted({bytes(n).decode() for n in names})
with c.group("alone", 1, 0) as g:
    big = np.arange(1 << 20, dtype=np.float32)
    assert np.array_equal(g.broadcast(big), big) and np.array_equal(g.reduce(big), big)
    assert np.array_equal(g.allreduce(big), big) and np.array_equal(g.alltoall([big])[0], big)
# Bound tasks that wait behind one that runs, while others are idle: they stay where they are.
bound = [c.options(node=there).submit(time.sleep, 0.3) for _ in range(4)]
c.wait(bound)
print(*[f.result(40) for f in c.spmd(peer, 6, 6, "all")][0])
print(*[f.result(40) for f in c.spmd(peer, 3, 3, "one", node=there)][0])
print(*[f.result(40) for f in c.options(node=there).spmd(peer, 2, 2, "two")][0])
""",
    )
    assert out.splitlines() == [
        "15.0 ['h1', 'h2', 'h3']",
        "3.0 ['h3']",
        "1.0 ['h3']",
    ]


@pytest.mark.soak
def test_the_host_of_an_executor_dies(lan_permitted: None) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        driver = lan[1].popen(
            cluster.program(
                WAIT_FOR_ALL
                + """
e = c.executor(2, node=there)
both = c.executor(2, node=[there, next(n for n in c.nodes if n.host == "h2" and n.workers)])
def slowly(i):
    time.sleep(0.1)
    return i
list(e.map(slowly, range(4), chunksize=1)), list(both.map(slowly, range(4), chunksize=1))
running = [e.submit(slowly, i) for i in range(30)]
shared = [both.submit(slowly, i) for i in range(30)]
print("sent", flush=True)
print({type(f.exception(40)).__name__ for f in running[20:]}, sum(f.result(40) for f in shared))
print(type(e.submit(slowly, 1).exception(40)).__name__)
both.shutdown()
"""
            ),
            env=cluster.env,
            stdout=-1,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "sent\n"
        lan[2].kill()
        assert driver.stdout.read().splitlines() == ["{'NodeLostError'} 435", "NodeLostError"]
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0
        del cluster.joined[1]
        assert cluster.end() == [0, 0]


def test_a_member_dies_while_its_part_is_sent(cluster: UpCluster, lan: Lan) -> None:
    """Others have begun to receive what it has not written to the end."""
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
import signal
def peer(rank, size):
    from hoplite_mp._group import multi_host as member
    with hoplite_mp.current().group("mortal", size, rank, timeout=30) as g:
        g.barrier()
        if rank == 1:
            tell, told = g._calls._hosts._channel.tell, []
            def tell_and_die(ask, sent=None):
                tell(ask, sent)
                told.append(ask)
                if len(told) == 4:
                    time.sleep(0.1)
                    os.kill(os.getpid(), signal.SIGKILL)
            g._calls._hosts._channel.tell = tell_and_die
        found = []
        for step in range(3):
            total = g.allreduce(np.full(6 << 20, rank + step + 1, np.float32))
            found.append((g.contributors, float(total.min()), float(total.max())))
        parts = g.allgather(np.full(1 << 20, rank, np.float32))
        return found, [part is None for part in parts]
futures = c.options(retries=0).spmd(peer, 3, 3)
print(type(futures[1].exception(60)).__name__)
first, third = futures[0].result(60), futures[2].result(60)
print(first == third, first)
used = lambda: max(node["bytes_used"] for node in c.stats()["nodes"].values())
deadline = time.monotonic() + 20
while used() > 16 << 20 and time.monotonic() < deadline:
    time.sleep(0.1)
print(used() <= 16 << 20)
""",
    )
    lines = out.splitlines()
    assert lines[0] == "WorkerLostError"
    living = "((0, 2), {0}, {0})"
    rows = ", ".join(living.format(float(value)) for value in (4, 6, 8))
    assert lines[1] == f"True ([{rows}], [False, True, False])"
    assert lines[2] == "True"


def test_a_large_global_on_another_host(cluster: UpCluster, lan: Lan) -> None:
    """It travels as an object of its own, and what has changed of it, once."""
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
big = np.zeros(1 << 20)
def at(i):
    return float(big[i]), os.uname().nodename
far = c.options(node=there)
for n in range(4):
    big[n] = n + 1
    futures = [far.submit(at, n) for _ in range(3)]
    assert {f.result(60) for f in futures} == {(n + 1.0, "h3")}
    assert c.submit(at, n).result(60)[0] == n + 1
assert set(far.map(at, range(64), chunksize=8)) == {(1.0, "h3"), (2.0, "h3"), (3.0, "h3"),
                                                    (4.0, "h3"), (0.0, "h3")}
print("all")
""",
    )
    assert "all" in out


def test_what_their_processes_send_to_a_node_runs_there(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
def name():
    return os.uname().nodename
def send(rank=0):
    c = hoplite_mp.current()
    nodes = sorted((n for n in c.nodes if n.workers), key=lambda n: n.host)
    return [c.options(node=n).submit(name).result(30) for n in nodes]
print(c.spmd(send, 1, node=there)[0].result(60))
with c.executor(1, node=there) as e:
    print(e.submit(send).result(60))
print(c.options(node=there).actor(type("A", (), {"send": lambda self: send()})).send().result(60))
""",
    )
    assert out.splitlines() == ["['h1', 'h2', 'h3']"] * 3


def test_threads_of_processes_on_another_host_are_its_cores_divided_by_them(
    cluster: UpCluster, lan: Lan
) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + """
from hoplite_mp._supervisor.environment import blas_threads_here
for name in [name for name in os.environ if name.endswith("_NUM_THREADS")]:
    raise SystemExit(f"{name} is set here")
cores = c.submit(lambda: len(os.sched_getaffinity(0))).result()
def threads(*_):
    return {blas_threads_here(), int(os.environ["OMP_NUM_THREADS"])}
class Where:
    def threads(self):
        return threads()
found = []
for size in (1, 2):
    with c.executor(size, node=there) as e:
        found.append(e.submit(threads).result() == {max(1, cores // size)})
found.append({*c.spmd(threads, 1, node=there)[0].result()} == {cores})
found.append(c.options(node=there).actor(Where).threads().result() == {1})
print(found)
""",
    )
    assert out.strip() == str([True] * 4)
