"""Queues, locks and events between hosts, and what happens to them when hosts die."""

from __future__ import annotations

from tests.lan import Lan
from tests.support.clusters import Driver, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL

MEMBERS = """
import queue
second = [n for n in c.nodes if n.host == "h2" and n.workers][0]
class Member:
    def __init__(self, used):
        self.used = used
    def call(self, method, *args):
        return getattr(self.used, method)(*args)
def waits(used, count):
    deadline = time.monotonic() + 30
    while used.actor.waiters().result(30) != count:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.005)
def member(node, used):
    made = c.options(node=node).actor(Member, used)
    made.call("__repr__").result(30)
    return made
"""


def test_from_everywhere(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + MEMBERS
        + """
q = hoplite_mp.Queue(5, node=there)
def put_all(q, who):
    for i in range(20):
        q.put((who, i))
def get_all(q):
    got = []
    while (item := q.get()) is not None:
        got.append(item)
    return got
putting = [c.options(node=n).submit(put_all, q, n.host) for n in c.nodes if n.workers]
getting = [c.options(node=n).submit(get_all, q) for n in c.nodes if n.workers]
c.wait(putting)
for _ in getting:
    q.put(None)
got = [f.result(30) for f in getting]
print(sorted(item for items in got for item in items) ==
      sorted((n.host, i) for n in c.nodes if n.workers for i in range(20)))
for items in got:
    for n in c.nodes:
        mine = [i for who, i in items if who == n.host]
        assert mine == sorted(mine), items
big = np.arange(1 << 18)
q.put(big)
print(np.array_equal(c.options(node=second).submit(q.get).result(30), big))
print(np.array_equal((q.put(c.options(node=there).submit(np.ones, 1 << 18).result(30)), q.get())[1],
                     np.ones(1 << 18)))
lock, event = hoplite_mp.Lock(name="far", node=there), hoplite_mp.Event()
def named():
    with hoplite_mp.Lock(name="far"):
        return hoplite_mp.current().here.host
print([c.options(node=n).submit(named).result(30) for n in (second, there)])
waiting = [c.options(node=n).submit(event.wait) for n in (second, there)]
waits(event, 1)
event.set()
print([f.result(30) for f in waiting])
""",
    )
    assert out.split("\n")[:-1] == ["True", "True", "True", "['h2', 'h3']", "[True, True]"]


def test_a_host_dies(lan_permitted: None) -> None:
    """One holds a lock there and one a permit, one waits in a queue; another queue and another lock
    are there themselves."""
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        program = (
            WAIT_FOR_ALL
            + MEMBERS
            + """
lock, q = hoplite_mp.Lock(), hoplite_mp.Queue()
semaphore = hoplite_mp.Semaphore(2, node=second)
holder, getter = member(there, lock), member(there, q)
permits = member(there, semaphore)
assert holder.call("acquire").result(30) and permits.call("acquire").result(30)
assert not lock.acquire(timeout=0.05)
lost = getter.call("get")
waits(q, 1)
acquiring = c.options(node=second).submit(lock.acquire)
waits(lock, 1)
far = hoplite_mp.Queue(node=there)
getting = c.options(node=second).submit(far.get)
waits(far, 1)
far_lock = hoplite_mp.Lock(node=there)
far_lock.acquire()
print("ready", flush=True)
input()
q.put("for the living")
print(acquiring.result(30), q.get(timeout=30), flush=True)
while semaphore.get_value() != 2:
    time.sleep(0.01)
print({type(one.exception(30)).__name__ for one in (lost, getting)}, flush=True)
for call in (lambda: far.put(1), far.qsize, far_lock.release, lambda: far_lock.acquire(timeout=5)):
    try:
        call()
    except hoplite_mp.ActorLostError as error:
        print("lost", end=" ")
print(flush=True)
"""
        )
        with Driver(cluster, lan[0], program) as driver:
            assert driver.hear() == "ready"
            lan[2].kill()
            driver.say()
            assert driver.hear() == "True for the living"
            assert driver.hear() == "{'ActorLostError'}"
            assert driver.hear() == "lost lost lost lost "
        cluster.joined.pop()
        assert cluster.end() == [0, 0]


def test_another_driver_that_is_killed(lan: Lan, cluster: UpCluster) -> None:
    """It holds a lock that another one had made, and waits in a queue."""
    with Driver(
        cluster,
        lan[0],
        """
lock, q = hoplite_mp.Lock(name="of all"), hoplite_mp.Queue(name="jobs")
print("made", flush=True)
input()
q.put(1)
print(lock.acquire(timeout=30), q.get(timeout=30), flush=True)
""",
    ) as first:
        assert first.hear() == "made"
        second = Driver(
            cluster,
            lan[1],
            """
import signal
lock, q = hoplite_mp.Lock(name="of all"), hoplite_mp.Queue(name="jobs")
lock.acquire()
print("held", flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
""",
        )
        assert second.hear() == "held"
        second.say()
        assert second.end() != 0
        first.say()
        assert first.hear() == "True 1"


def test_conditions_and_barriers_between_hosts(cluster: UpCluster, lan: Lan) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + MEMBERS
        + """
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
barrier, changed = hoplite_mp.Barrier(3, node=there), hoplite_mp.Condition(node=second)
lock, seen = hoplite_mp.RLock(node=hosts[0]), hoplite_mp.Queue()
def peer(rank):
    assert barrier.wait(30) in range(3)
    with lock, lock:
        seen.put(os.uname().nodename)
    with changed:
        changed.notify_all()
        assert changed.wait_for(lambda: seen.qsize() == 3, 30)
    return barrier.wait(30)
print(sorted(c.get(c.options(node=hosts).spmd(peer, 3))), sorted(seen.get() for _ in range(3)))
""",
    )
    assert out.splitlines() == ["[0, 1, 2] ['h1', 'h2', 'h3']"]


def test_a_host_dies_with_owners_and_waiters(lan_permitted: None) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        program = (
            WAIT_FOR_ALL
            + MEMBERS
            + """
lock, barrier, changed = hoplite_mp.RLock(), hoplite_mp.Barrier(3), hoplite_mp.Condition()
owner, arrives, waits_there = [member(there, one) for one in (lock, barrier, changed)]
assert owner.call("acquire").result(30) and owner.call("acquire").result(30)
arrives.call("wait")
class Waiter:
    def __init__(self, used):
        self.used = used
    def wait(self):
        with self.used:
            return self.used.wait()
dies = c.options(node=there).actor(Waiter, changed)
lost = dies.wait()
waits(changed, 1)
stays = c.options(node=second).actor(Waiter, changed).wait()
waits(changed, 2)
local = c.options(node=second).submit(barrier.wait)
while barrier.n_waiting < 2:
    time.sleep(0.01)
print("ready", flush=True)
input()
assert lock.acquire(timeout=30)
print(type(local.exception(30)).__name__, barrier.broken, flush=True)
with changed:
    changed.notify()
print(stays.result(30), flush=True)
"""
        )
        with Driver(cluster, lan[0], program) as driver:
            assert driver.hear() == "ready"
            lan[2].kill()
            driver.say()
            assert driver.hear() == "BrokenBarrierError True"
            assert driver.hear() == "True"
        cluster.joined.pop()
        assert cluster.end() == [0, 0]
