"""Actors on other hosts than their callers."""

from __future__ import annotations

import signal

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, UpCluster, signal_all
from tests.support.lan_programs import ACTOR_CLASSES, WAIT_FOR_ALL


def test_calls_from_everywhere(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + ACTOR_CLASSES
        + """
far = c.options(node=there).actor(Counter, c.put(10))
print(far.where().result(30), far.add().result(30), far.add(c.submit(int, "5")).result(30))
big = np.ones(1 << 20)
print(far.total(big).result(30), far.total(c.put(big)).result(30))
print(float(far.give(1 << 20).result(30).sum()))
print(type(far.fail().exception(30)).__name__)
futures = [c.options(node=n).submit(call_it, far, 50) for n in c.nodes if n.workers]
c.wait(futures)
assert sorted(f.result() for f in futures) == [17, 18, 19], [f.result() for f in futures]
seen = far.notes().result(30)
for who in {s[:2] for s in seen}:
    assert [s[2] for s in seen if s[:2] == who] == list(range(50)), who
print(len(seen))
def slowly(value):
    time.sleep(0.2)
    return value
other = c.options(node=second).actor(Counter)
other.note(c.options(node=there).submit(slowly, "first"))
for i in range(100):
    other.note(i)
print(other.notes().result(30) == ["first", *range(100)])
pid = other.pid().result(30)
assert Actor.restarts(other) == 0
del other
def gone():
    return not os.path.exists(f"/proc/{pid}")
while not c.options(node=second).submit(gone).result(30):
    time.sleep(0.02)
print("gone")
""",
    )
    assert out.splitlines() == [
        "h3 11 16",
        f"{float(1 << 20)} {float(1 << 20)}",
        str(16.0 * (1 << 20)),
        "KeyError",
        "150",
        "True",
        "gone",
    ]


def test_an_actor_that_alone_holds_results_of_its_host(cluster: UpCluster, lan: Lan) -> None:
    """The driver, whose node owns the results, lets go of them, and is given the refs back."""
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + ACTOR_CLASSES
        + """
class Keeper:
    def __init__(self):
        self.refs = {}
    def keep(self, i, box):
        self.refs[i] = box["ref"]
    def give(self):
        return self.refs
    def drop(self):
        self.refs = {}
import hoplite_mp
def make(i, size):
    return np.full(size, i)
keepers = [c.options(node=n).actor(Keeper) for n in c.nodes if n.workers]
used = c.stats()["bytes_used"]
for size in (3, 100_000):
    for at in keepers:
        futures = [c.submit(make, i, size) for i in range(40)]
        kept = [at.keep(i, {"ref": hoplite_mp.by_ref(f)}) for i, f in enumerate(futures)]
        c.wait(kept)
        del futures, kept
        for i, ref in at.give().result(30).items():
            assert c.get(ref, timeout=30)[-1] == i
        del ref
        at.drop().result(30)
deadline = time.monotonic() + 30
while c.stats()["bytes_used"] > used + (4 << 20):
    assert time.monotonic() < deadline, (used, c.stats()["bytes_used"])
    time.sleep(0.1)
print("all")
""",
    )
    assert out == "all\n", out


def test_close_finishes_the_calls_made_before_on_another_host(cluster: UpCluster, lan: Lan) -> None:
    """Those that are on their way, that wait in the queue, that wait for an argument, on either
    host; not the later ones."""
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + ACTOR_CLASSES
        + """
def slow(x):
    time.sleep(0.2)
    return x
large = c.put(np.ones(1 << 20))
for turn in range(4):
    one = c.options(node=there).actor(Counter, 1)
    calls = [one.add() for i in range(100)]
    calls.append(one.total(large))
    calls.append(one.add(c.submit(slow, 10)))
    calls.append(one.add())
    Actor.close(one)
    late = one.add()
    print(*[call.result(30) for call in calls[98:]], type(late.exception(30)).__name__)
""",
    )
    assert out.splitlines() == ["100 101 1048576.0 111 112 ActorLostError"] * 4


def test_names_in_the_whole_cluster(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + ACTOR_CLASSES
        + """
one = c.options(node=there, name="one").actor(Counter, 1)
def by_name():
    return hoplite_mp.current().get_actor("one").add().result(30)
print(*[c.options(node=n).submit(by_name).result(30) for n in c.nodes if n.workers])
for node in c.nodes:
    if node.workers:
        try:
            c.options(node=node, name="one").actor(Counter)
        except ValueError as error:
            print(str(error)[:35])
        same = c.options(node=node, name="one", get_if_exists=True).actor(Counter)
        assert same == one
Actor.close(one)
try:
    while True:
        c.get_actor("one")
        time.sleep(0.02)
except LookupError as error:
    print(error)
print(type(one.add().exception(30)).__name__)
killed = c.options(node=there, name="one", restarts=1).actor(Counter, 7)
def kill(pid):
    os.kill(pid, signal.SIGKILL)
c.options(node=there).submit(kill, killed.pid().result(30)).result(30)
while not Actor.restarts(killed):
    time.sleep(0.02)
print(killed.add().result(30))
Actor.kill(killed)
print(type(killed.add().exception(30)).__name__)
""",
    )
    assert out.splitlines() == [
        "2 3 4",
        *["there is an actor named 'one' alread"[:35]] * 3,
        "there is no actor named 'one' in this cluster, or it has ended",
        "ActorLostError",
        "8",
        "ActorLostError",
    ]


def test_its_host_dies(lan_permitted: None) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        driver = lan[1].popen(
            cluster.program(
                WAIT_FOR_ALL
                + ACTOR_CLASSES
                + """
import tempfile
far = c.options(node=there, name="far").actor(Counter)
far.add().result(30)
gate = tempfile.mkdtemp() + "/gate"
def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
running, waiting = far.wait(600), [far.add() for _ in range(200)]
held = far.add(c.options(node=second).submit(until, gate))
print("called", flush=True)
running.exception(40)
open(gate, "w").close()
print({type(f.exception(40)).__name__ for f in [running, *waiting, held, far.add()]})
try:
    c.get_actor("far")
except LookupError:
    print("free")
"""
            ),
            env=cluster.env,
            stdout=-1,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "called\n"
        lan[2].kill()
        assert driver.stdout.read().splitlines() == ["{'ActorLostError'}", "free"]
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0
        del cluster.joined[1]
        assert cluster.end() == [0, 0]


@pytest.mark.usefixtures("usual_heartbeats")
def test_its_host_is_lost_before_it_has_begun(lan_permitted: None) -> None:
    """What the call raises is about the node, as for tasks, and no mistake of its caller's."""
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        driver = lan[1].popen(
            cluster.program(
                WAIT_FOR_ALL
                + ACTOR_CLASSES
                + """
import sys
view = c.options(node=there)
print("ready", flush=True)
sys.stdin.readline()
for again in range(2):
    try:
        view.actor(Counter)
    except hoplite_mp.NodeLostError as error:
        print("lost")
"""
            ),
            env=cluster.env,
            stdin=-1,
            stdout=-1,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdin is not None
        assert driver.stdout.readline() == "ready\n"
        signal_all(lan[2], signal.SIGSTOP)
        driver.stdin.write("go\n")
        driver.stdin.close()
        assert driver.stdout.read().splitlines() == ["lost", "lost"]
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0
        signal_all(lan[2], signal.SIGCONT)
        lan[2].kill()
        del cluster.joined[1]
        assert cluster.end() == [0, 0]
