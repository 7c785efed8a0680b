"""Programs that drivers and members run on emulated hosts, as text."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

from tests.lan import Lan
from tests.lan.emulation import UNLIMITED
from tests.support.clusters import PATIENCE_S, UpCluster

if TYPE_CHECKING:
    from pathlib import Path


WAIT_FOR_ALL = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
there = [n for n in c.nodes if n.host == "h3" and n.workers][0]
"""


ACTOR_CLASSES = """
import signal
from hoplite_mp import Actor
class Counter:
    def __init__(self, value=0):
        self.value, self.seen = value, []
    def add(self, amount=1):
        self.value += amount
        return self.value
    def note(self, what):
        self.seen.append(what)
    def notes(self):
        return self.seen
    def where(self):
        return os.uname().nodename
    def pid(self):
        return os.getpid()
    def total(self, array):
        return float(array.sum())
    def give(self, size):
        return np.full(size, self.value, np.float64)
    def fail(self):
        raise KeyError("on purpose")
    def wait(self, seconds):
        time.sleep(seconds)
def call_it(handle, n):
    for i in range(n):
        handle.note((os.uname().nodename, os.getpid(), i))
    return handle.add().result(30)
second = next(n for n in c.nodes if n.host == "h2" and n.workers)
"""


def run_members(
    cluster: UpCluster, lan: Lan, name: str, program: str, per_host: int = 1
) -> list[list[str]]:
    """The program as so many members on each host, with `g`, `rank`, `size`; what each says."""
    size = per_host * len(list(lan))
    running = []
    for number, host in enumerate(lan):
        source = (
            "import os, signal, sys, threading, time, numpy as np, hoplite_mp\n"
            f"size = {size}\n"
            "lines = {}\n"
            "def arrays(kind, shape=(1000,), dtype=np.float32):\n"
            "    return [np.random.default_rng(r).standard_normal(shape).astype(dtype)\n"
            "            for r in range(size)]\n"
            "def run(rank):\n"
            "    said = lines[rank] = []\n"
            "    say = lambda *words: said.append(' '.join(map(str, words)))\n"
            f"    with c.group({name!r}, size, rank) as g:\n"
            + textwrap.indent(textwrap.dedent(program), "        ")
            + f"\nwith hoplite_mp.Cluster(address={cluster.address!r}, "
            f"tls={None if cluster.tls else False}, memory='256MiB') as c:\n"
            f"    ranks = range({number * per_host}, {(number + 1) * per_host})\n"
            "    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]\n"
            "    [thread.start() for thread in threads]\n"
            "    [thread.join() for thread in threads]\n"
            "    for rank in ranks: print('|'.join(lines[rank]))\n"
        )
        running.append(
            host.popen(
                [sys.executable, "-c", source],
                env=cluster.env,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    found = []
    for process in running:
        out, _ = process.communicate(timeout=PATIENCE_S)
        found += [line.split("|") for line in out.splitlines()]
    return found


HOSTS = 3


# What a driver needs: where tasks run, counts of runs, and a way to have hosts killed.
TOOLS = """
deadline = time.monotonic() + 30
while sum(n.workers for n in c.nodes) < {hosts} and time.monotonic() < deadline:
    time.sleep(0.02)
ids = {{n.host: n.id for n in c.nodes if n.workers}}
def make(name, *args):
    with open({runs!r} + name, "a") as file:
        file.write("x")
    return np.full(200_000, 1.0 + sum(float(a[0]) for a in args))
GATE = {runs!r} + "gate"
def runs(name):
    return len(open({runs!r} + name).read())
def killed(*hosts):
    print("kill", *hosts, flush=True)
    deadline = time.monotonic() + 30
    while {{ids[host] for host in hosts}} & {{n.id for n in c.nodes}}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
def only_at(host, name, *args, **options):
    '''A result that only that host has, of a task that may run anywhere: the others are busy.'''
    gate = {runs!r} + name + ".gate"
    def busy():
        open(gate + os.uname().nodename, "w").close()
        while not os.path.exists(gate):
            time.sleep(0.005)
    living = {{n.id for n in c.nodes}}
    others = [other for other, node in ids.items() if other != host and node in living]
    held = [c.options(node=ids[other]).submit(busy) for other in others]
    while not all(os.path.exists(gate + other) for other in others):
        time.sleep(0.005)
    future = c.options(**options).submit(make, name, *args)
    c.wait(future)
    open(gate, "w").close()
    c.wait(held)
    assert c.locations(future.ref) == [ids[host]]
    return future
def lost(ref):
    try:
        c.get(ref, timeout=30)
    except hoplite_mp.ObjectLostError as error:
        return str(error)
def counts():
    return {{node: (v["objects"], v["bytes_used"]) for node, v in c.stats()["nodes"].items()}}
def grown(before):
    '''Nodes that hold more than then, when there was time to let go: but for a span or two.'''
    deadline = time.monotonic() + 30
    while True:
        more = {{
            node: (now, before[node]) for node, now in counts().items()
            if now[0] > before[node][0] or now[1] > before[node][1] + (2 << 20)
        }}
        if not more or time.monotonic() > deadline:
            return more
        time.sleep(0.05)
"""


def run_with_losses(hosts: int, runs: Path, program: str, rate: str = UNLIMITED) -> list[str]:
    """A driver on the first host; hosts that it names are killed. Returns what else it prints."""
    with Lan(hosts, rate) as lan:
        cluster = UpCluster(lan, tls=False)
        text = TOOLS.format(hosts=hosts, runs=f"{runs}/") + textwrap.dedent(program)
        driver = lan[0].popen(
            cluster.program(text), env=cluster.env, stdout=subprocess.PIPE, text=True
        )
        assert driver.stdout is not None
        said: list[str] = []
        joined = {host.name: process for host, process in zip(lan[1:], cluster.joined, strict=True)}
        for line in driver.stdout:
            word, *names = line.split()
            if word == "kill":
                for host in [host for host in lan if host.name in names]:
                    host.kill()
                    cluster.joined.remove(joined[host.name])
            else:
                said.append(line.strip())
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0, said
        assert cluster.end() == [0] * (len(cluster.joined) + 1)
    return said


LOADED_S = float(os.environ.get("HOPLITE_MP_LOADED_S", "600"))


def stay_when_loaded(cluster: UpCluster) -> None:
    """Every core is wanted by several processes that never sleep, and objects move meanwhile: all
    three hosts are there all the time."""
    out = cluster.run(
        cluster.lan[0],
        f"""
        deadline = time.monotonic() + 30
        while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        for node in [n for n in c.nodes if n.workers]:
            c.add_workers(2, node=node)
        before = [n.id for n in c.nodes if n.workers]
        end = time.time() + {LOADED_S}
        def burn(array):
            while time.time() < end:
                array = np.sort(array)[::-1].copy()
            return os.uname().nodename
        burning = [c.options(node=node).submit(burn, np.random.default_rng(i).random(1 << 16))
                   for node in before for i in range(2)]
        def touch(array):
            return float(array[0])
        while time.time() < end:
            for node in before:
                assert c.options(node=node).submit(touch, np.ones(1 << 18)).result(60) == 1.0
        assert [n.id for n in c.nodes if n.workers] == before
        print(len([future.result(60) for future in burning]))
        """,
        patience_s=LOADED_S + PATIENCE_S,
    )
    assert out.strip() == "6"


SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))

HOST_DEATHS_PROGRAM = """
import hashlib, pathlib, subprocess, tempfile
FOLDER = pathlib.Path(tempfile.mkdtemp())  # hosts share the disk
COUNT, KIND = {count}, {kind!r}
ELEMENTS = {elements}
SMALL_CALLS = 200
LARGE_CALLS = 12  # of each kind; after the first one engines vote for most of them
LOST = (hoplite_mp.ObjectLostError, hoplite_mp.ReduceError, hoplite_mp.NodeLostError)
def all_there(lost):
    deadline = time.monotonic() + 60
    while True:
        found = sorted((n for n in c.nodes if n.workers), key=lambda n: n.host)
        if len(found) == COUNT and lost not in [n.id for n in found]:
            return found
        assert time.monotonic() < deadline, c.nodes
        time.sleep(0.01)
def make(turn, i):
    rng = np.random.default_rng([turn, i])
    return rng.integers(-1000, 1000, ELEMENTS).astype(np.float32)
def total(turn, contributors):
    return sum(make(turn, i) for i in contributors)
def digest(array):
    return hashlib.sha256(array).hexdigest()
def small(g, turn, rank, mine):
    "Calls that the engines make among themselves, and some that make them give the calls back."
    sums = {{}}
    for i in range(SMALL_CALLS):
        part = slice(i, i + 100)
        got = g.allreduce(mine[part])
        if g.contributors not in sums:
            sums[g.contributors] = total(turn, g.contributors)
        assert np.array_equal(got, sums[g.contributors][part]), (i, g.contributors)
        g.barrier()
        got = g.broadcast(mine[part] if rank == 0 else None, root=0)
        assert np.array_equal(got, make(turn, 0)[part]), i
        if i % 10 == 0:
            for source, got in enumerate(g.allgather(mine[part])):
                assert (got is None) == (source not in g.contributors), (i, source)
                assert got is None or np.array_equal(got, make(turn, source)[part]), (i, source)
        if i % 50 == 0:
            got = g.allreduce(mine)
            assert np.array_equal(got, total(turn, g.contributors)), (i, g.contributors)
def large(g, turn, rank, mine):
    "Calls that nodes begin by themselves and engines commit, each again and again."
    sums = {{}}
    def wanted():
        if g.contributors not in sums:
            sums[g.contributors] = total(turn, g.contributors)
        return sums[g.contributors]
    for i in range(LARGE_CALLS):
        part = slice(1000 * i, 1000 * i + (1 << 18))
        got = g.allreduce(mine[part])
        assert np.array_equal(got, wanted()[part]), (i, g.contributors)
        got = g.broadcast(mine[part] if rank == 0 else None, root=0)
        assert np.array_equal(got, make(turn, 0)[part]), i
        got = g.reduce(mine[part], root=0)
        assert (got is None) == (rank != 0)
        assert got is None or np.array_equal(got, wanted()[part]), (i, g.contributors)
        for source, got in enumerate(g.allgather(mine[part])):
            assert (got is None) == (source not in g.contributors), (i, source)
            assert got is None or np.array_equal(got, make(turn, source)[part]), (i, source)
        got = g.reduce_scatter(mine[part])
        slices = np.array_split(wanted()[part], COUNT)
        assert np.array_equal(got, slices[rank]), (i, g.contributors)
def member(name, turn, rank):
    mine = make(turn, rank)
    with hoplite_mp.current().group(name, COUNT, rank, timeout=60) as g:
        g.barrier()
        (FOLDER / f"{{turn}} {{rank}}").touch()
        while not (FOLDER / f"{{turn}} go").exists():
            time.sleep(0.001)
        if KIND == "group small":
            small(g, turn, rank, mine)
        if KIND == "group large":
            large(g, turn, rank, mine)
        if KIND == "group broadcast":
            got = g.broadcast(mine if rank == 0 else None, root=0)
            return (0,), digest(got)
        if KIND == "group reduce":
            got = g.reduce(mine, root=0)
            return g.contributors, None if got is None else digest(got)
        got = g.allreduce(mine)
        return g.contributors, digest(got)
def start(turn, at):
    if KIND.startswith("group"):
        pools = [c.executor(1, node=n) for n in at]
        tasks = [pool.options(retries=0).submit(member, f"{{KIND}} {{turn}}", turn, i)
                 for i, pool in enumerate(pools)]
        while not all((FOLDER / f"{{turn}} {{i}}").exists() for i in range(COUNT)):
            time.sleep(0.001)
        return pools, tasks
    refs = [c.options(node=n, retries=0).submit(make, turn, i).ref for i, n in enumerate(at)]
    c.wait(refs)
    return refs, None
def work(turn, refs, tasks):
    "Returns the ranks that were in it, or why there is no result."
    if KIND.startswith("group"):
        results = {{}}
        for rank, task in enumerate(tasks):
            try:
                results[rank] = task.result(40)
            except hoplite_mp.WorkerLostError:
                pass
        assert len(results) >= COUNT - 1, results
        (contributors,) = {{found for found, _ in results.values()}}
        assert set(contributors) >= set(results) or KIND == "group broadcast", results
        wanted = digest(total(turn, contributors))
        assert {{found for _, found in results.values()}} <= {{wanted, None}}
        assert KIND != "group reduce" or results[0][1] == wanted
        return contributors
    if KIND in ("reduce", "allreduce"):
        made = getattr(c, KIND)(refs, num=COUNT - 1)
        got = c.get(made, timeout=40)
        contributors = made.contributors
        assert len(contributors) == COUNT - 1, contributors
        wanted = total(turn, contributors)
        assert np.array_equal(got, wanted)
        if KIND == "allreduce":
            assert everywhere(made) == {{digest(wanted)}}
        return contributors
    if KIND == "broadcast":
        c.broadcast(refs[{source}]).result(40)
        assert everywhere(refs[{source}]) == {{digest(make(turn, {source}))}}
        return ({source},)
    if KIND == "gather":
        try:
            c.gather(refs).result(40)
        except LOST as error:
            pass
        there = []
        for rank, ref in enumerate(refs):
            try:
                assert np.array_equal(c.get(ref, timeout=40), make(turn, rank))
                there.append(rank)
            except LOST:
                pass
        assert len(there) >= COUNT - 1
        return tuple(there)
    raise AssertionError(KIND)
def everywhere(ref):
    found = []
    for node in [n for n in c.nodes if n.workers]:
        try:
            found.append(c.options(node=node, retries=0).submit(digest, ref).result(40))
        except (hoplite_mp.NodeLostError, ValueError):  # the second: it was lost before
            pass
    assert len(found) >= COUNT - 1
    return set(found)
turn, lost = 0, ""
while True:
    at = all_there(lost)
    held, tasks = start(turn, at)
    print("ready", flush=True)
    over = input() == "over"
    begun = time.monotonic()
    (FOLDER / f"{{turn}} go").touch()
    if over:
        break
    try:
        found = work(turn, held, tasks)
    except hoplite_mp.HopliteTimeoutError:
        subprocess.run([sys.executable, "-m", "hoplite_mp", "dump", {address!r}, "--no-tls"],
                       stdout=sys.stderr)
        raise
    print(time.monotonic() - begun, *found, flush=True)
    lost = {{n.host: n.id for n in at}}.get(input(), "")
    while lost in [n.id for n in c.nodes]:  # the others did not need it, and it comes to light late
        assert time.monotonic() < begun + 60
        time.sleep(0.01)
    print("gone", flush=True)
    if tasks:
        for pool in held:
            pool.shutdown(wait=False)
    del held, tasks
    turn += 1
"""
