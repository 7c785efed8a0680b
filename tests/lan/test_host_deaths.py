"""A host, or the manager, dies at a random byte of a collective: the others end it, and what they
have is exact. A host that becomes slow is not lost: nothing may be missing.

One program starts an operation again and again, the same one, on all hosts; here a host is killed,
stopped, cut off or slowed down after a random part of the time that the operation takes
undisturbed. Arrays hold small whole numbers, so that any order of adding gives the same bits. A
host that has died comes again before the next turn.
"""

from __future__ import annotations

import os
import random
import signal
import time
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli.up_join import REJOINS_MAX
from hoplite_mp._supervisor.manager_process import STARTS_MAX, STARTS_S
from tests.lan import Lan
from tests.lan.test_cluster import PATIENCE_S, UpCluster
from tests.lan.test_silence import Driver, everything

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

TURNS = int(os.environ.get("HOPLITE_MP_DEATHS", "50"))
RATE, SLOW = "1gbit", "100mbit"
MANAGER_LIFE_S = 1.2 * STARTS_S / STARTS_MAX
LOST_NOBODY = ("slowed", "manager")
SEED = int(os.environ.get("HOPLITE_MP_SEED", str(random.randrange(1 << 30))))

PROGRAM = """
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

KINDS = ["broadcast", "reduce", "allreduce", "gather"]
GROUP_KINDS = ["group allreduce", "group broadcast", "group reduce", "group small", "group large"]
# Of all whom nothing but time was taken from.
FROM_ALL = ("gather", "group allreduce", "group reduce", "group small", "group large")
ELEMENTS = {
    "gather": 1 << 21,
    "group small": 1 << 16,
    "group large": 1 << 19,
}  # all of gather's are to fit on one host


@pytest.fixture(params=[4, pytest.param(8, marks=pytest.mark.soak)])
def cluster(lan_permitted: None, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    with Lan(request.param, RATE) as lan:
        made = UpCluster(lan, tls=False)
        yield made
        assert made.end()[0] == 0


def kill_manager(host: Host) -> None:
    """As soon as there is one: the last one has just been killed, perhaps."""
    deadline = time.monotonic() + PATIENCE_S
    while host.run(["pkill", "-KILL", "-x", "hoplite manager"]).returncode:
        assert time.monotonic() < deadline, "there is no manager"
        time.sleep(0.005)


def turns(cluster: UpCluster, kind: str, how: str, count: int, elements: int) -> list[float]:
    """Runs `count` disturbed turns; returns how long they took, in undisturbed ones."""
    lan = cluster.lan
    dice = random.Random(SEED)
    names = {"count": len(lan.hosts), "kind": kind, "elements": elements, "source": 0}
    program = PROGRAM.format(**names, address=cluster.address)
    found = []
    with Driver(cluster, lan[0], program) as driver:
        usual = []
        for _ in range(2):  # the first one is cold
            assert driver.hear() == "ready"
            driver.say()
            seconds, *ranks = driver.hear().split()
            assert ranks, "the program has ended"
            driver.say("nobody")
            assert driver.hear() == "gone"
            usual.append(float(seconds))
        killed_at = -MANAGER_LIFE_S
        times: dict[int, int] = {}  # by number of a host
        for _ in range(count):
            assert driver.hear() == "ready"
            if how == "manager":  # one that dies too often is not started again
                time.sleep(max(0.0, killed_at + MANAGER_LIFE_S - time.monotonic()))
            victim = dice.choice(list(lan)[1:])
            driver.say()
            time.sleep(dice.random() * usual[-1])
            if how == "manager":
                kill_manager(lan[0])
                killed_at = time.monotonic()
            elif how == "killed":
                victim.kill()
            elif how == "cut":
                victim.cut()
            elif how == "slowed":
                victim.shape(SLOW, SLOW)
            else:
                everything(victim, signal.SIGSTOP)
            seconds, *ranks = driver.hear().split() or [""]
            assert ranks, f"seed {SEED}: the program has ended"
            if how in LOST_NOBODY and kind in FROM_ALL:
                assert len(ranks) == len(lan.hosts), f"seed {SEED}: only {ranks}"
            driver.say("nobody" if how in LOST_NOBODY else victim.name)
            assert driver.hear() == "gone"
            found.append(float(seconds) / usual[-1])
            times[victim.number] = times.get(victim.number, 0) + 1
            if how == "cut":
                victim.mend()
            elif how == "slowed":
                victim.shape(RATE, RATE)
            elif how == "stopped":
                everything(victim, signal.SIGCONT)
            if how in ("stopped", "cut") and times[victim.number] % REJOINS_MAX == 0:
                victim.kill()  # it would not come again so often
            if victim not in lan.hosts:
                again = lan.add(victim.number)
                cluster.joined.append(cluster.join(again, 1))
        assert driver.hear() == "ready"
        driver.say("over")
    return found


@pytest.mark.parametrize("kind", ["broadcast"])
def test_a_host_is_killed(cluster: UpCluster, kind: str) -> None:
    turns(cluster, kind, "killed", 1, 1 << 22)


@pytest.mark.parametrize("kind", ["reduce"])
def test_the_manager_is_killed(cluster: UpCluster, kind: str) -> None:
    turns(cluster, kind, "manager", 2, 1 << 22)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("how", ["killed", "stopped", "cut", "slowed", "manager"])
@pytest.mark.parametrize("kind", [*KINDS, *GROUP_KINDS])
def test_a_host_is_lost_at_a_random_byte(cluster: UpCluster, kind: str, how: str) -> None:
    found = turns(cluster, kind, how, TURNS, ELEMENTS.get(kind, 1 << 24))
    print(f"{kind}, one {how}: {len(found)} turns, the longest took {max(found):.1f} usual ones")
