"""The manager's host is lost, and a standby takes over: what runs goes on, nobody decides twice."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._supervisor.manager_process import STARTS_MAX
from tests.lan import Lan
from tests.support.clusters import (
    HOPLITE,
    PATIENCE_S,
    Driver,
    StandbyCluster,
    pids_named,
    signal_all,
)
from tests.support.lan_programs import HOST_DEATHS_PROGRAM, SEED, stay_when_loaded
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

pytestmark = pytest.mark.usefixtures("as_users_start_them", "usual_heartbeats")

DELAY_S_MAX = 20.0
"""Of a driver, from the death of the manager's host on, on a loaded machine. The lease is 1.5 s,
and its calls wait 40 s for a manager that does not come."""


STANDBY_IS = r"(?m)^standby at 10\.77\.0\.2:7001, on h[12]"


@pytest.fixture
def three(lan_permitted: None) -> Iterator[StandbyCluster]:
    with Lan(3, "1gbit") as lan:
        made = StandbyCluster(lan, tls=True)
        made.wait_for_standby()
        yield made


@pytest.fixture
def cluster(lan_permitted: None) -> Iterator[StandbyCluster]:
    with Lan(4) as lan:
        made = StandbyCluster(lan)
        made.wait_for_standby()
        yield made


# A driver on the third host: tasks that run, a broadcast and a Group at work, all at once.
WORKS = """
import threading
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
hosts = {n.host: n for n in c.nodes if n.workers}
for node in [hosts["h2"], hosts["h3"]]:
    c.add_workers(2, node=node)
first = hosts["h1"].id
big = np.arange(1 << 21, dtype=np.float64)
def slow(i):
    time.sleep(0.2)
    return i
def member(rank):
    sums = []
    with hoplite_mp.current().group("at work", 2, rank, timeout=60) as g:
        for call in range(30):
            sums.append(float(g.allreduce(np.full(1000, rank + call, np.float64))[0]))
            time.sleep(0.1)
        return sums, g.contributors
def total(array):
    return float(array.sum())
members = [c.executor(1, node=hosts[h]).options(retries=0).submit(member, i)
           for i, h in enumerate(("h2", "h3"))]
tasks = [c.submit(slow, i) for i in range(40)]
time.sleep(0.5)
print("ready", flush=True)
input()
begun = time.monotonic()
ref = c.put(big)
c.broadcast(ref, to=list(hosts[h] for h in ("h2", "h3"))).result(40)
print("broadcast", round(time.monotonic() - begun, 2), flush=True)
sums = c.reduce([c.submit(np.full, 100_000, i) for i in range(5)])
assert float(c.get(sums, timeout=40)[0]) == 10.0
print("reduced", round(time.monotonic() - begun, 2), flush=True)
assert [task.result(60) for task in tasks] == list(range(40))
wanted = [1.0 + 2 * call for call in range(30)]
for one in members:
    assert one.result(60) == (wanted, (0, 1)), one.result()
for h in ("h2", "h3"):
    assert c.options(node=hosts[h]).submit(total, ref).result(40) == float(big.sum())
deadline = time.monotonic() + 20
while first in [n.id for n in c.nodes]:
    time.sleep(0.05)
    assert time.monotonic() < deadline
print("all", *sorted(n.host for n in c.nodes if n.workers), flush=True)
"""


def test_the_managers_host_is_killed(three: StandbyCluster) -> None:
    """While a driver elsewhere has tasks, a Group at work and begins a broadcast: all ends well."""
    cluster, lan = three, list(three.lan)
    with Driver(cluster, lan[2], WORKS) as driver:
        assert driver.hear() == "ready"
        assert re.search(STANDBY_IS, cluster.command(lan[2], "status", cluster.address).stdout)
        lan[0].kill()
        driver.say()
        word, seconds = driver.hear().split()
        assert word == "broadcast"
        assert float(seconds) < DELAY_S_MAX
        word, seconds = driver.hear().split()
        assert word == "reduced"
        assert float(seconds) < DELAY_S_MAX
        print(f"the driver waited {seconds} s")
        assert driver.hear() == "all h2 h3"
        leads = rf"{STANDBY_IS}, which is the manager$"
        assert re.search(leads, cluster.command(lan[2], "status").stdout)
    assert cluster.end_standby() == [0, 0]


BOTH_SIDES = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < COUNT and time.monotonic() < deadline:
    time.sleep(0.02)
print("ready", *sorted(n.host for n in c.nodes if n.workers), flush=True)
while (line := input()) != "over":
    refs = [c.put(np.full(1000, float(i))) for i in range(3)]
    try:  # of this host alone, but only a manager may say that it is done
        print(float(c.get(c.reduce(refs), timeout=float(line))[0]), flush=True)
    except hoplite_mp.HopliteError as error:
        print(type(error).__name__, flush=True)
print(*sorted(n.host for n in c.nodes if n.workers), flush=True)
"""


def both_sides(cluster: StandbyCluster, host: Host) -> Driver:
    count = len(cluster.lan.hosts)
    return Driver(cluster, host, BOTH_SIDES.replace("COUNT", str(count)))


@pytest.mark.soak
@pytest.mark.parametrize("cut_s", [0.5, 6.0, 30.0])
def test_the_managers_host_is_cut_off(cluster: StandbyCluster, cut_s: float) -> None:
    """Its manager decides nothing after the lease; the others do, when they have another one. When
    the way is there again, that host joins them as a node. A short cut is only a delay."""
    lan = list(cluster.lan)
    with both_sides(cluster, lan[3]) as there:
        here = both_sides(cluster, lan[0])
        assert there.hear().split() == here.hear().split()
        lan[0].cut()
        begun = time.monotonic()
        time.sleep(min(cut_s, 2.0))  # the lease is over, or the cut
        if cut_s > 1:
            here.say("3")
            assert here.hear() == "HopliteTimeoutError"
            there.say("20")
            assert there.hear() == "3.0"
            time.sleep(max(0.0, begun + cut_s - time.monotonic()))
        lan[0].mend()
        if cut_s < 1:
            here.say("20")
            assert here.hear() == "3.0"
            here.say("over")
            assert here.hear() == "h1 h2 h3 h4"
        else:
            here.say("30")
            assert here.hear() in ("NodeLostError", "ClosedError", "")
            assert cluster.up.stdout is not None
            assert cluster.up.stdout.readline().startswith("node h")  # it has joined again
        assert here.end() == int(cut_s > 1)
        there.say("20")
        assert there.hear() == "3.0"
        there.say("over")
        assert len(there.hear().split()) == 4
    assert (cluster.end() if cut_s < 1 else cluster.end_standby()) == [0] * (3 + (cut_s < 1))


@pytest.mark.soak
@pytest.mark.parametrize("stopped_s", [1.0, 6.0, 20.0])
def test_the_managers_host_is_stopped(cluster: StandbyCluster, stopped_s: float) -> None:
    """When it is continued its manager knows only its clock, and decides nothing by it. The driver
    has a node of its own, which is no host of the cluster, and follows the standby, too."""
    lan = list(cluster.lan)
    cluster.attaches = False
    with both_sides(cluster, lan[3]) as there:
        assert there.hear() == "ready h1 h2 h3 h4"
        signal_all(lan[0], signal.SIGSTOP)
        begun = time.monotonic()
        there.say("20")
        if stopped_s > 2:
            assert there.hear() == "3.0"
        time.sleep(max(0.0, begun + stopped_s - time.monotonic()))
        signal_all(lan[0], signal.SIGCONT)
        if stopped_s < 2:
            assert there.hear() == "3.0"
        else:
            assert cluster.up.stdout is not None
            assert cluster.up.stdout.readline().startswith("node h")
        there.say("20")
        assert there.hear() == "3.0"
        there.say("over")
        assert there.hear() == "h1 h2 h3 h4"
    assert (cluster.end() if stopped_s < 2 else cluster.end_standby())[-3:] == [0, 0, 0]


@pytest.mark.soak
def test_half_and_half(lan_permitted: None) -> None:
    """Two of four hosts with the manager go on, the two with the standby do not; nor do they by a
    human's word, unless that is repeated."""
    with Lan(4) as lan:
        cluster = StandbyCluster(lan)
        cluster.wait_for_standby()
        with both_sides(cluster, lan[0]) as here:
            assert here.hear().startswith("ready")
            for near in (lan[0], lan[2]):
                for far in (lan[1], lan[3]):
                    near.separate(far, "blackhole")
                    far.separate(near, "blackhole")
            time.sleep(4)
            here.say("10")
            assert here.hear() == "3.0"
            refused = cluster.command(lan[3], "promote")
            assert refused.returncode == 1
            assert "only 2 of 4 hosts are reachable" in refused.stderr
            here.say("over")
            assert here.hear() == "h1 h3"
        cluster.close()


@pytest.fixture
def two(lan_permitted: None) -> Iterator[StandbyCluster]:
    with Lan(2) as lan:
        made = StandbyCluster(lan)
        made.wait_for_standby()
        yield made


def test_of_two_hosts_one_is_promoted(two: StandbyCluster) -> None:
    """Nobody takes over by itself; the driver there waits, and goes on."""
    lan = list(two.lan)
    refused = two.command(lan[1], "promote")
    assert refused.returncode == 1
    assert "in contact with the manager" in refused.stderr
    with both_sides(two, lan[1]) as driver:
        assert driver.hear() == "ready h1 h2"
        lan[0].kill()
        driver.say("1.7")  # longer than the lease of the manager that is gone
        assert "in term 2" in two.command(lan[1], "promote").stdout  # too soon: it waits
        assert driver.hear() in ("HopliteTimeoutError", "3.0")
        driver.say("10")
        assert driver.hear() == "3.0"
        driver.say("over")
        assert driver.hear() == "h2"
    assert two.end_standby() == [0]


@pytest.mark.soak
def test_both_lead_until_they_hear_of_each_other(two: StandbyCluster) -> None:
    """A human was wrong: the other host was only cut off. It steps down when it hears so."""
    lan = list(two.lan)
    with both_sides(two, lan[1]) as driver:
        assert driver.hear() == "ready h1 h2"
        lan[0].cut()
        eventually(
            lambda: "no manager is running" in two.command(lan[1], "status").stdout,
            "status does not say that no manager is running",
            pause_s=0.05,
        )
        assert two.command(lan[1], "promote").returncode == 0
        lan[0].mend()
        assert two.up.stdout is not None
        assert two.up.stdout.readline().startswith("node h2")
        driver.say("10")
        assert driver.hear() == "3.0"
        driver.say("over")
        assert driver.hear() == "h1 h2"
    assert two.end_standby() == [0]


@pytest.mark.soak
def test_processes_of_managers_die(cluster: StandbyCluster) -> None:
    """The manager's, while there is a standby: it is started again, and leads. The standby's: it
    waits again, and leads when it is needed; and again, when it has led. Who joins there later
    takes part."""
    lan = list(cluster.lan)
    with both_sides(cluster, lan[3]) as driver:
        assert driver.hear().startswith("ready")
        for host, name in ((lan[0], "hoplite manager"), (lan[1], "hoplite standby")):
            (before,) = pids_named(host, name)
            assert host.run(["kill", "-9", str(before)]).returncode == 0
            eventually(
                lambda: pids_named(host, name) not in ([], [before]),  # noqa: B023
                f"no {name} again",
                pause_s=0.05,
            )
            driver.say("10")
            assert driver.hear() == "3.0"
        lan[0].kill()
        driver.say("20")
        assert driver.hear() == "3.0"
        (before,) = pids_named(lan[1], "hoplite standby")
        assert lan[1].run(["kill", "-9", str(before)]).returncode == 0
        driver.say("20")
        assert driver.hear() == "3.0"
        driver.say("over")
        assert driver.hear() == "h2 h3 h4"
    again = cluster.lan.add(1)
    late = again.popen(
        [*HOPLITE, "join", cluster.standby, "--workers", "1", *cluster.options],
        env=cluster.env,
        stdout=subprocess.PIPE,
        text=True,
    )
    with late:
        assert late.stdout is not None
        assert late.stdout.readline().startswith("node h")
        assert "is already the manager" in cluster.command(lan[2], "promote").stdout
        assert cluster.end_standby() == [0, 0, 0]
        assert late.wait(PATIENCE_S) == 0


@pytest.mark.soak
def test_a_standby_that_always_dies(cluster: StandbyCluster) -> None:
    """It is not started again; its host, which has its manager elsewhere, goes on."""
    lan = list(cluster.lan)
    with both_sides(cluster, lan[3]) as driver:
        assert driver.hear().startswith("ready")
        before = 0
        for _ in range(STARTS_MAX):
            eventually(
                lambda: set(pids_named(lan[1], "hoplite standby")) - {before},  # noqa: B023
                "a standby",
                pause_s=0.05,
            )
            (before,) = pids_named(lan[1], "hoplite standby")
            assert lan[1].run(["kill", "-9", str(before)]).returncode == 0
        driver.say("10")
        assert driver.hear() == "3.0"
        assert not pids_named(lan[1], "hoplite standby")
        driver.say("over")
        assert driver.hear() == "h1 h2 h3 h4"
    assert cluster.end()[0] == 0


@pytest.mark.soak
def test_the_standbys_host_is_killed(cluster: StandbyCluster) -> None:
    lan = list(cluster.lan)
    with both_sides(cluster, lan[3]) as driver:
        assert driver.hear().startswith("ready")
        lan[1].kill()
        driver.say("20")
        assert driver.hear() == "3.0"
        driver.say("over")
        driver.hear()
    assert cluster.end()[2:] == [0, 0]


@pytest.mark.soak
def test_the_program_that_made_the_cluster_is_killed(cluster: StandbyCluster) -> None:
    """Nobody wanted the end of the cluster: its host is lost, the others go on."""
    lan = list(cluster.lan)
    with both_sides(cluster, lan[3]) as driver:
        assert driver.hear().startswith("ready")
        lan[0].signal(cluster.up, signal.SIGKILL)
        eventually(
            lambda: not pids_named(lan[0], "hoplite manager"),
            "its processes are left",
            pause_s=0.05,
        )
        driver.say("20")
        assert driver.hear() == "3.0"
        driver.say("over")
        assert driver.hear() == "h2 h3 h4"
    assert cluster.end_standby() == [0, 0, 0]


@pytest.mark.soak
def test_most_hosts_leave_at_once(cluster: StandbyCluster) -> None:
    """In order: the manager goes on without them."""
    lan = list(cluster.lan)
    with both_sides(cluster, lan[0]) as driver:
        assert driver.hear().startswith("ready")
        for host, process in zip(list(lan)[1:], cluster.joined, strict=True):
            host.signal(process, signal.SIGTERM)
        assert [process.wait(PATIENCE_S) for process in cluster.joined] == [0, 0, 0]
        driver.say("10")
        assert driver.hear() == "3.0"
        driver.say("over")
        assert driver.hear() == "h1"
    assert cluster.end()[0] == 0


@pytest.mark.soak
def test_a_loaded_manager_is_not_replaced(three: StandbyCluster) -> None:
    stay_when_loaded(three)
    assert pids_named(three.lan[0], "hoplite manager")
    assert three.end() == [0, 0, 0]


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["broadcast", "reduce", "allreduce", "gather", "group allreduce"])
@pytest.mark.parametrize("turn", range(3))
def test_it_is_killed_at_a_random_byte(lan_permitted: None, kind: str, turn: int) -> None:
    """All hosts take part in the operation, the manager's too: the others end it, exactly."""
    dice = random.Random(SEED + turn)
    with Lan(4, "1gbit") as lan:
        cluster = StandbyCluster(lan)
        hosts = list(lan)
        cluster.wait_for_standby()
        names = {"count": 4, "kind": kind, "elements": 1 << 22, "source": 1}
        program = HOST_DEATHS_PROGRAM.format(**names, address=cluster.address)
        with Driver(cluster, hosts[3], program) as driver:
            for _ in range(2):  # the first one is cold
                assert driver.hear() == "ready"
                driver.say()
                usual, *ranks = driver.hear().split()
                assert ranks
                driver.say("nobody")
                assert driver.hear() == "gone"
            assert driver.hear() == "ready"
            driver.say()
            time.sleep(dice.random() * float(usual))
            hosts[0].kill()
            seconds, *ranks = driver.hear().split() or [""]
            assert ranks, f"seed {SEED}: the program has ended"
            print(f"{kind}: {seconds} s in place of {usual}, of {ranks}")
            driver.say("h1")
            assert driver.hear() == "gone"
            # The operation may have been over before: then it is not said yet who leads.
            assert "is already the manager" in cluster.command(hosts[1], "promote").stdout
            late = lan.add(1).popen(
                [*HOPLITE, "join", cluster.standby, "--workers", "1", *cluster.options],
                env=cluster.env,
            )
            assert driver.hear() == "ready"
            driver.say("over")
        assert cluster.end_standby() == [0, 0, 0]
        assert late.wait(PATIENCE_S) == 0
