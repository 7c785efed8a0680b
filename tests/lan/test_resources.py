"""Resources of several hosts: where what needs them runs, and what happens when a host is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, Driver, UpCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Begin = Callable[..., UpCluster]

BEGIN = """
from hoplite_mp import NodeLostError
deadline = time.monotonic() + 30
def have(count):
    while sum(n.resources.get("gpu", 0) for n in c.nodes) != count and time.monotonic() < deadline:
        time.sleep(0.02)
def where():
    return os.uname().nodename
def what():
    return where(), hoplite_mp.current().assigned, os.environ.get("CUDA_VISIBLE_DEVICES")
gpu = c.options(resources={"gpu": 1})
"""


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.fixture
def begin(lan: Lan) -> Iterator[Begin]:
    """Clusters on these hosts, which are gone when the test is, also if it has failed."""
    made: list[UpCluster] = []

    def up(**options: Any) -> UpCluster:
        made.append(UpCluster(lan, tls=False, **options))
        return made[-1]

    yield up
    for cluster in made:
        cluster.kill()


def test_those_that_have_rested_go_first(lan: Lan, begin: Begin) -> None:
    """Of hosts that are as good."""
    cluster = begin(workers=1, joins=0)
    cluster.joined = [cluster.join(lan[at], 1, ["--resources", "gpu=1"]) for at in (1, 2)]
    out = cluster.run(
        lan[0], BEGIN + "have(2)\nprint(*[gpu.submit(where).result(30) for _ in range(6)])"
    )
    names = out.splitlines()[-1].split()
    assert names[:2] * 3 == names
    assert len(set(names)) == 2


def test_they_run_where_it_is(lan: Lan, begin: Begin) -> None:
    cluster = begin(workers=2, joins=0)
    cluster.joined = [
        cluster.join(lan[1], 2, ["--resources", "gpu=2,disk=0.5"]),
        cluster.join(lan[2], 1),
    ]
    out = cluster.run(
        lan[0],
        BEGIN
        + """
have(2)
while len(c.nodes) < 3:
    time.sleep(0.02)
(there,) = [n for n in c.nodes if n.resources]
bare = [n for n in c.nodes if not n.resources]
print(there.host, there.resources, there.resources_free)
print(sorted(f.result(30)[0] for f in [gpu.submit(what) for _ in range(6)]))
print(c.options(resources={"gpu": 2}).submit(what).result(30))
print(c.options(resources={"disk": 0.5}).submit(what).result(30))
print(gpu.actor(type("A", (), {"go": lambda self: what()})).go().result(30))
with gpu.executor(2) as e:
    import tempfile
    folder = tempfile.mkdtemp()  # hosts share the disk
    def meet(i):
        open(f"{folder}/{os.getpid()}", "w").close()
        while len(os.listdir(folder)) < 2:
            time.sleep(0.01)
        return what()
    print(*sorted(e.map(meet, range(2), chunksize=1), key=str))
    waits = gpu.submit(what)
    time.sleep(0.2)
    print(waits.done(), c.stats()["resources_free"])
print(waits.result(30)[0], *sorted(f.result(30)[1][0] for f in gpu.spmd(lambda r: (r, what()), 2)))
for wrong in ({"gpu": 3}, {"tpu": 1}):
    try:
        c.options(resources=wrong).submit(what)
    except ValueError as error:
        print(str(error).partition(":")[0])
try:
    c.options(resources={"gpu": 1}, node=bare).submit(what)
except ValueError as error:
    named = ", ".join(n.id for n in bare)  # which is which depends on who joined first
    print(str(error).partition(":")[0].replace(named, "without"))
print(c.options(resources={"gpu": 1}, node=c.nodes).submit(where).result(30))
""",
    )
    assert out.splitlines() == [
        "h2 {'disk': 0.5, 'gpu': 2} {'disk': 0.5, 'gpu': 2}",
        "['h2', 'h2', 'h2', 'h2', 'h2', 'h2']",
        "('h2', {'gpu': [0, 1]}, None)",
        "('h2', {'disk': []}, None)",
        "('h2', {'gpu': [0]}, '0')",
        "('h2', {'gpu': [0]}, '0') ('h2', {'gpu': [1]}, '1')",
        "False {'disk': 0.5, 'gpu': 0}",
        "h2 h2 h2",
        "no node of this cluster has gpu 3",
        "no node of this cluster has tpu 1",
        "none of the nodes without has gpu 1",
        "h2",
    ]
    command = [sys.executable, "-m", "hoplite_mp", "status", cluster.address, "--no-tls"]
    deadline = time.monotonic() + PATIENCE_S
    while True:  # what the program has left behind goes soon after its end
        shown = lan[0].run(
            command, env=cluster.env, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S
        )
        if "disk 0.5 of 0.5, gpu 2 of 2" in shown.stdout:
            break
        assert time.monotonic() < deadline, shown.stdout
    assert "resources free" in shown.stdout
    assert cluster.end() == [0, 0, 0]


def test_two_hosts_ask_for_what_a_third_one_has(lan: Lan, begin: Begin) -> None:
    """Each believes that it is free; the one that has it decides."""
    cluster = begin(workers=1, joins=0)
    cluster.joined = [
        cluster.join(lan[1], 1),
        cluster.join(lan[2], 2, ["--resources", "gpu=1"]),
    ]
    program = (
        BEGIN
        + """
import tempfile
have(1)
def alone():
    path = os.path.join(tempfile.gettempdir(), "hoplite_mp resources FOLDER")
    os.mkdir(path)  # FileExistsError: another one runs
    time.sleep(0.01)
    os.rmdir(path)
    return where()
print(*{f.result(60) for f in [gpu.submit(alone) for _ in range(20)]})
"""
    ).replace("FOLDER", str(id(cluster)))
    drivers = [
        host.popen(
            cluster.program(program),
            env=cluster.driver_env(host),
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in list(lan)[:2]
    ]
    assert [driver.communicate(timeout=PATIENCE_S)[0] for driver in drivers] == ["h3\n", "h3\n"]
    assert cluster.end() == [0, 0, 0]


def test_hosts_that_have_it_come_and_go(lan: Lan, begin: Begin) -> None:
    cluster = begin(workers=1, joins=0, HOPLITE_MP_RESOURCE_WAIT_S="1.5")
    first = cluster.join(lan[1], 1, ["--resources", "gpu=1"])
    with Driver(
        cluster,
        lan[0],
        BEGIN
        + """
def say(*words):  # one write, because the thread that prints lines of workers shares stdout
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()
def long(word, path):
    say(word, "on", where())
    while not os.path.exists(path):
        time.sleep(0.01)
    return where()
import tempfile
path = os.path.join(tempfile.mkdtemp(), "gate")  # hosts share the disk
have(1)
running, waiting = gpu.submit(long, "begun", path), gpu.submit(where)
say("waiting on", waiting.result(60))  # on the host that comes later
open(path, "w").close()
c.wait(running)
have(1)
say("driver:", running.result(60))
say("now", gpu.submit(where).result(60))
shut = os.path.join(tempfile.mkdtemp(), "gate")
lost = [gpu.options(retries=0).submit(long, "again", shut), gpu.submit(where)]
for one in lost:
    try:
        one.result(60)
    except NodeLostError as error:
        say(error)
have(0)
try:
    gpu.submit(where)
except ValueError as error:
    say(str(error).partition(":")[0])
""",
    ) as driver:

        def until(text: str) -> str:
            assert driver.process.stdout is not None
            for line in driver.process.stdout:
                if text in line:
                    return line.strip()
            raise AssertionError(f"{text!r} was not printed")

        until("begun on h2")
        second = cluster.join(lan[2], 1, ["--resources", "gpu=1"])
        assert until("waiting on") == "waiting on h3"
        lan[1].signal(first, 9)
        first.wait(PATIENCE_S)
        until("driver: h")  # it had ended on one host, or has run again on the other
        assert until("now") == "now h3"
        until("again on h3")
        lan[2].signal(second, 9)
        second.wait(PATIENCE_S)
        assert "was lost while it ran long()" in until("was lost")
        line = until("no worker can run")
        assert "no node has gpu 1 any longer" in line
        assert "within 1.5 s (resource_wait_s)" in line
        assert until("no node of this cluster") == "no node of this cluster has gpu 1"
    assert cluster.end() == [0]


def test_a_lost_result_is_made_again_when_there_is_room_for_it(lan: Lan, begin: Begin) -> None:
    """The run that makes it again waits for what the task needs, and has it while it runs."""
    cluster = begin(workers=1, joins=0)
    first = cluster.join(lan[1], 1, ["--resources", "gpu=1"])
    with Driver(
        cluster,
        lan[0],
        BEGIN
        + """
import pathlib, tempfile
folder = pathlib.Path(tempfile.mkdtemp())  # hosts share the disk
def make():
    given = hoplite_mp.current().assigned
    (folder / f"{where()}.{len(list(folder.iterdir()))}").touch()
    return np.full(200_000, 1 + len(given["gpu"]))
def hold():
    (folder / "held").touch()
    while not (folder / "open").exists():
        time.sleep(0.005)
have(1)
made = gpu.submit(make)
c.wait(made)
print("made", flush=True)
input()
have(2)
(third,) = [n for n in c.nodes if n.host == "h3" and n.resources]
held = gpu.options(node=third).submit(hold)
while not (folder / "held").exists():
    time.sleep(0.005)
print("held", flush=True)
input()
have(1)
try:
    c.get(made, timeout=1.5)
except hoplite_mp.HopliteTimeoutError:
    print("waits", len(list(folder.glob("h3.*"))), flush=True)
(folder / "open").touch()
held.result(30)
print(c.get(made, timeout=30)[-1], len(list(folder.glob("h3.*"))), flush=True)
deadline = time.monotonic() + 20
while c.stats()["resources_free"]["gpu"] != 1 and time.monotonic() < deadline:
    time.sleep(0.02)
print(c.stats()["resources_free"], gpu.submit(what).result(30)[:2], flush=True)
""",
    ) as driver:
        assert driver.hear() == "made"
        second = cluster.join(lan[2], 1, ["--resources", "gpu=1"])
        cluster.joined = [second]
        driver.say()
        assert driver.hear() == "held"
        lan[1].signal(first, 9)
        first.wait(PATIENCE_S)
        driver.say()
        assert driver.hear() == "waits 0"
        assert driver.hear() == "2 1"
        assert driver.hear() == "{'gpu': 1} ('h3', {'gpu': [0]})"
    assert cluster.end() == [0, 0]


def test_actors_that_are_made_in_a_row_go_where_there_is_room(lan: Lan, begin: Begin) -> None:
    """What the first ones keep on other hosts, this one's node does not know."""
    cluster = begin(workers=1, joins=0, more=["--resources", "gpu=1"])
    cluster.joined = [
        cluster.join(lan[1], 1, ["--resources", "gpu=2"]),
        cluster.join(lan[2], 1, ["--resources", "gpu=1"]),
    ]
    out = cluster.run(
        lan[0],
        BEGIN
        + """
have(4)
class A:
    def go(self):
        return where()
made = [gpu.actor(A) for _ in range(4)]
print(sorted(a.go().result(30) for a in made))
fifth = gpu.actor(A)
call = fifth.go()
print(c.wait([call], timeout=0.2)[0])
for one in made:
    hoplite_mp.Actor.close(one)
print(call.result(30) in ("h1", "h2", "h3"))
""",
    )
    assert out.splitlines() == ["['h1', 'h2', 'h2', 'h3']", "[]", "True"]
    assert set(cluster.end()) == {0}


def test_what_is_kept_for_somebody_who_gives_up_is_others(lan: Lan, begin: Begin) -> None:
    """A host refuses a task because one of its own waits for more than is free; that one is
    cancelled, and nothing is given back."""
    cluster = begin(workers=1, joins=0)
    cluster.joined = [cluster.join(lan[1], 2, ["--resources", "gpu=2"])]
    out = cluster.run(
        lan[0],
        BEGIN
        + """
class There:
    def begin(self):
        here = hoplite_mp.current()
        self.holds = here.options(resources={"gpu": 1}).actor(list)
        self.holds.copy().result(30)
        self.waits = here.options(resources={"gpu": 2}).submit(where)
    def cancel(self):
        return self.waits.cancel()
have(2)
there = c.options(node=[n for n in c.nodes if n.resources]).actor(There)
there.begin().result(30)
refused = gpu.submit(where)
print(c.wait(refused, timeout=0.4)[0])
print(there.cancel().result(30), refused.result(30))
""",
    )
    assert out.splitlines() == ["[]", "True h2"]
    assert cluster.end() == [0, 0]
