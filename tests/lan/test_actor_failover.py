"""Actors whose host dies begin again on another one: calls, names, ends, several callers."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, StandbyCluster, UpCluster
from tests.support.lan_programs import ACTOR_CLASSES, WAIT_FOR_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("as_users_start_them")

BEGIN = (
    WAIT_FOR_ALL
    + ACTOR_CLASSES
    + """
import functools
print = functools.partial(print, flush=True)
"""
)


@pytest.fixture
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


def test_calls_that_had_not_begun_go_on_elsewhere(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    program = """
far = c.options(node=[there, second], restarts=2, name="far").actor(Counter, c.put(100))
assert far.where().result(30) == "h3"
assert far.add().result(30) == 101
running, waiting = far.wait(60), [far.note(i) for i in range(300)]
held = far.add(c.submit(time.sleep, 1) and c.submit(int, "5"))
while not running.running():
    time.sleep(0.01)
print("called", flush=True)
error = running.exception(60)
print(type(error).__name__, "may have begun" in str(error))
print({f.exception(60) for f in waiting}, held.result(60))
print(far.notes().result(30) == list(range(300)), far.where().result(30), Actor.restarts(far))
print(c.get_actor("far") == far, c.get_actor("far").add().result(30))
def by_name():
    return hoplite_mp.current().get_actor("far").add().result(30)
print(c.submit(by_name).result(30))
Actor.close(far)
try:
    while True:
        c.get_actor("far")
        time.sleep(0.02)
except LookupError:
    print("closed")
"""
    with Driver(cluster, lan[1], BEGIN + program) as driver:
        assert driver.hear() == "called"
        lan[2].kill()
        assert driver.hear() == "ActorLostError True"
        assert driver.hear() == "{None} 105"
        assert driver.hear() == "True h2 1"
        assert driver.hear() == "True 106"
        assert driver.hear() == "107"
        assert driver.hear() == "closed"
    del cluster.joined[1]
    assert cluster.end() == [0, 0]


def test_callers_on_several_hosts_and_two_deaths(lan_permitted: None) -> None:
    """Each caller's calls go on in their order; what ran is tried again, as they have retries."""
    with Lan(4) as lan:
        cluster = UpCluster(lan, tls=False)
        program = """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())  # hosts share the disk
class Gated(Counter):
    def until(self, path):
        while not path.exists():
            time.sleep(0.01)
def call(handle, dead, gate):
    me, futures, since = os.uname().nodename, [], None
    while not gate.exists() or len(futures) < 200:
        if since is None and dead.exists():
            since = len(futures)  # from here on the host is dead
        futures.append(handle.note((me, len(futures))))
        time.sleep(0.002)
    n = len(futures)
    return me, {f.exception(90) for f in futures}, n if since is None else since, n
last = next(n for n in c.nodes if n.host == "h4" and n.workers)
far = c.options(node=[there, last, second], restarts=2, retries=2, name="far", detached=True)
far = far.actor(Gated)
where = far.where().result(30)
assert where == "h3"
for word in ("called", "again"):
    dead, gate = folder / f"{word}-dead", folder / word
    nodes = [n for n in c.nodes if n.workers and n.host != where]
    callers = [c.options(node=n).submit(call, far, dead, gate) for n in nodes]
    while len({who for who, _ in far.notes().result(30)}) < len(callers):
        time.sleep(0.01)
    running = far.until(gate)
    while not running.running():
        time.sleep(0.01)
    print(word)
    input()
    dead.touch()
    late = [far.note(("late", i)) for i in range(100)]
    while Actor.restarts(far) < ("called", "again").index(word) + 1:
        time.sleep(0.01)
    gate.touch()
    print(running.exception(90), {f.exception(90) for f in late})
    made = [f.result(90) for f in callers]
    seen = far.notes().result(60)
    print({errors == {None} for _, errors, *_ in made})
    for who, _, since, n in [*made, ("late", None, 0, 100)]:
        # Some before `since` had ended on the host that died, others are tried again.
        of_it = [i for name, i in seen if name == who]
        assert of_it == sorted({*of_it}), (who, of_it)
        assert [i for i in of_it if i >= since] == list(range(since, n)), (who, since, n, of_it)
    where = far.where().result(60)
    print(Actor.restarts(far), where, c.get_actor("far") == far)
"""
        begin = BEGIN.replace("< 3", "< 4")
        with Driver(cluster, lan[0], begin + program) as driver:
            assert driver.hear() == "called"
            lan[2].kill()
            driver.say()
            assert driver.hear() == "None {None}"
            assert driver.hear() == "{True}"
            count, first, found = driver.hear().split()
            assert (count, found) == ("1", "True")
            assert first in ("h2", "h4")
            assert driver.hear() == "again"
            lan[1 if first == "h2" else 2].kill()  # h1, h2 and h4 are left
            driver.say()
            assert driver.hear() == "None {None}"
            assert driver.hear() == "{True}"
            assert driver.hear() == ("2 h4 True" if first == "h2" else "2 h2 True")
        left = cluster.joined[2 if first == "h2" else 0]  # of h2, h3 and h4
        cluster.joined[:] = [left]
        assert cluster.end() == [0, 0]


def test_one_that_cannot_begin_elsewhere_says_why(lan: Lan) -> None:
    cluster = UpCluster(lan, tls=False)
    program = """
bound = c.options(node=there, restarts=5, name="bound").actor(Counter)
def there_first(restarts):
    while True:
        handle = c.options(node=[there, second], restarts=restarts).actor(Counter)
        if handle.where().result(30) == "h3":
            return handle
spent, free, killed = there_first(1), there_first(1), there_first(5)
def kill(pid):
    os.kill(pid, signal.SIGKILL)
for handle in (bound, spent, free, killed):
    print(handle.where().result(30))
c.options(node=there).submit(kill, spent.pid().result(30)).result(30)
while not Actor.restarts(spent):
    time.sleep(0.02)
spent.add().result(30)
print("made")
input()
while len([n for n in c.nodes if n.workers]) > 2:
    time.sleep(0.01)
Actor.kill(killed)
for handle in (bound, spent, killed):
    error = handle.add().exception(60)
    print(type(error).__name__, error)
print(free.add().result(60), free.where().result(30))
try:
    c.get_actor("bound")
except LookupError:
    print("its name is free")
"""
    with Driver(cluster, lan[1], BEGIN + program) as driver:
        for _ in range(4):
            assert driver.hear() == "h3"
        assert driver.hear() == "made"
        lan[2].kill()
        driver.say()
        heard = driver.hear()
        assert heard.startswith("ActorLostError the actor has lost its state"), heard
        assert re.search(r"and options\(node=\) binds it to node h\d$", heard), heard
        heard = driver.hear()
        assert heard.startswith("ActorLostError actor Counter has lost its state: node h"), heard
        assert heard.endswith("Its restarts are used up (options(restarts=1))"), heard
        assert driver.hear().startswith("ActorLostError")
        assert driver.hear() == "1 h2"
        assert driver.hear() == "its name is free"
    del cluster.joined[1]
    assert cluster.end() == [0, 0]


@pytest.mark.soak
@pytest.mark.usefixtures("usual_heartbeats")
def test_the_manager_dies_at_the_same_time(lan: Lan) -> None:
    """A standby takes over, and the actor of the first host begins again on another one."""
    cluster = StandbyCluster(lan)
    cluster.wait_for_standby()
    program = """
first = next(n for n in c.nodes if n.host == "h1" and n.workers)
far = c.options(node=[first, there], restarts=2, name="far", detached=True).actor(Counter, 7)
print(far.where().result(30), far.add().result(30))
input()
print(far.add().result(60), far.where().result(60), Actor.restarts(far))
print(c.get_actor("far") == far)
try:
    c.options(name="far").actor(Counter)
except ValueError:
    print("taken")
"""
    with Driver(cluster, lan[2], BEGIN + program) as driver:
        assert driver.hear() == "h1 8"
        lan[0].kill()
        driver.say()
        assert driver.hear() == "8 h3 1"
        assert driver.hear() == "True"
        assert driver.hear() == "taken"
    cluster.end_standby()
