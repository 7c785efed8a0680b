"""Ray on several hosts, with a node beside each of Ray's; hosts, actors and nodes die."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.programs import Logs, kill, processes, until
from tests.engines.ray_hosts import RayHosts
from tests.lan import Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

RANK = """
class Rank:
    def __init__(self, rank, size, name="ranks"):
        self.rank, self.size, self.name = rank, size, name
        col.init_collective_group(size, rank, group_name=name)
    def pid(self):
        return os.getpid()
    def alive(self):
        return ray.util.collective.collective.get_group_handle(self.name).group.alive
    def total(self, n=100_000):
        x = np.full(n, float(self.rank + 1))
        col.allreduce(x, self.name)
        assert (x == x[0]).all()
        return float(x[0])
    def until_whole(self):
        # All ranks see the same call as the first in which all took part.
        while True:
            x = np.ones(10)
            col.allreduce(x, self.name)
            if x[0] == self.size:
                return True
            time.sleep(0.01)
"""


@pytest.fixture
def lan() -> Iterator[Lan]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no emulated hosts: {reason}")
    with Lan(4) as made:
        yield made


@pytest.fixture
def hosts(lan: Lan, tmp_path: Path) -> Iterator[RayHosts]:
    """Ray on h1 (its head), h2 and h3; h4 is empty."""
    logs = Logs(tmp_path / "logs")
    made = RayHosts(lan, logs)
    for host in (lan[1], lan[2]):
        made.add(host)
    yield made
    print(logs.said())  # pytest shows it if the test has failed


def test_each_host_has_one_node_and_refs_travel_through_ray(hosts: RayHosts, lan: Lan) -> None:
    out = hosts.run(
        lan[0],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        say(sorted(n.host for n in c.nodes), [n.workers for n in c.nodes])
        look = ray.remote(here)
        found = ray.get([look.options(**on(h)).remote() for h in (1, 2, 3) for _ in range(2)])
        say(len(set(found)), all(attached for _, _, attached in found))

        big = c.put(np.arange(1_000_000.0))
        def total(refs):
            c = hoplite_mp.current()
            x = c.get(refs["a"][0])
            return float(x.sum()), x.flags.writeable, c.put(x * 2)
        total = ray.remote(total)
        answers = ray.get([total.options(**on(h)).remote({"a": [big]}) for h in (1, 2, 3)])
        say({(s, w) for s, w, _ in answers}, [float(c.get(r)[3]) for _, _, r in answers])
        c.broadcast(big).result()
        say(sorted(c.locations(big)) == sorted(n.id for n in c.nodes))
        mean = c.reduce([r for _, _, r in answers], op="mean")
        say(bool((c.get(mean) == 2 * c.get(big)).all()))
        again = hoplite_ray.init()
        say(len(again.nodes), again is c)
        hoplite_ray.shutdown()
        try:
            hoplite_mp.current()
        except hoplite_mp.errors.ClosedError as error:
            say("closed")
        say("ray goes on", ray.get(ray.remote(where).options(**on(2)).remote()))
        """,
    )
    assert out == [
        "['h1', 'h2', 'h3'] [0, 0, 0]",
        "3 True",
        "{(499999500000.0, False)} [6.0, 6.0, 6.0]",
        "True",
        "True",
        "3 True",
        "closed",
        "ray goes on h2",
    ]


def test_values_of_ray_are_reduced_and_sent_to_all_hosts(hosts: RayHosts, lan: Lan) -> None:
    out = hosts.run(
        lan[1],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        def made(k, seconds=0):
            time.sleep(seconds)
            return np.full(500_000, float(k))
        made = ray.remote(made)
        parts = [made.options(**on(h)).remote(h) for h in (1, 2, 3)]
        mean = hoplite_ray.reduce(parts, op="mean")
        x = ray.get(mean)
        say(x.shape, bool((x == 2).all()), mean.contributors)
        first = hoplite_ray.reduce([made.options(**on(1)).remote(9, 60), *parts], num=3)
        say(float(ray.get(first)[-1]), first.contributors)

        ref = hoplite_ray.broadcast(parts[2])
        say(sorted(c.locations(ref)) == sorted(n.id for n in c.nodes))
        def total(refs):
            return float(hoplite_mp.current().get(refs[0]).sum())
        total = ray.remote(total)
        say([ray.get(total.options(**on(h)).remote([ref])) for h in (1, 2, 3)])
        hoplite_ray.shutdown()
        """,
    )
    assert out == [
        "(500000,) True (0, 1, 2)",
        "6.0 (1, 2, 3)",
        "True",
        str([1_500_000.0] * 3),
    ]


def test_a_value_of_ray_that_is_lost_with_its_host_is_made_again(hosts: RayHosts, lan: Lan) -> None:
    program = hosts.program(
        lan[0],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        class Gate:
            def __init__(self):
                self.opened = False
            def open(self):
                self.opened = True
            def is_open(self):
                return self.opened
        gate = ray.remote(Gate).options(num_cpus=0, **on(1)).remote()
        def made(k):
            return np.full(500_000, float(k))
        def late(k):
            while not ray.get(gate.is_open.remote()):
                time.sleep(0.05)
            return made(k)
        def preferring(host):  # Ray may make the value elsewhere
            node = on(host)["scheduling_strategy"].node_id
            return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=True)}
        parts = [ray.remote(made).options(**preferring(h)).remote(h) for h in (1, 2, 3)]
        ray.wait(parts, num_returns=3, fetch_local=False)
        parts.append(ray.remote(late).options(**on(2)).remote(4))
        result = hoplite_ray.reduce(parts)
        say(result.contributors)
        heard()
        until(lambda: len(c.nodes) == 2, "the host is lost")
        ray.get(gate.open.remote())
        x = ray.get(result)
        say(bool((x == 10).all()), result.contributors)
        hoplite_ray.shutdown()
        """,
    )
    assert program.line() == "None"
    lan[2].kill()
    program.go_on()
    assert program.line() == "True (0, 1, 2, 3)"
    assert program.end() == []


def test_an_actor_and_then_a_host_die_in_a_group(hosts: RayHosts, lan: Lan) -> None:
    """The engine's worker is killed and comes again; then a host; then a host is added."""
    program = hosts.program(
        lan[0],
        RANK
        + """
until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
c = hoplite_ray.init(memory="100MiB")
made = ray.remote(Rank)
ranks = [made.options(max_restarts=1, max_task_retries=-1, num_cpus=0, **on(r + 1)).remote(r, 3)
         for r in range(3)]
say([ray.get(a) for a in [r.total.remote() for r in ranks]])
say(ray.get(ranks[1].pid.remote()))
heard()
# The survivors go on; then the one that Ray has started again takes part anew.
say({ray.get(a) for a in [ranks[0].total.remote(), ranks[2].total.remote()]} <= {4.0, 6.0})
assert all(ray.get([r.until_whole.remote() for r in ranks]))
assert ray.get([r.total.remote() for r in ranks]) == [6.0] * 3
say("whole")
heard()
until(lambda: len(c.nodes) == 2, "the host is lost")
say({ray.get(a) for a in [ranks[0].total.remote(), ranks[1].total.remote()]} == {3.0})
heard()
until(lambda: sorted(n.host for n in c.nodes) == ["h1", "h2", "h4"], "a node on the new host")
hoplite_ray.init()
ref = c.put(np.ones(1000))
def total(refs):
    return float(hoplite_mp.current().get(refs[0]).sum())
say(ray.get(ray.remote(total).options(**on(4)).remote([ref])))
hoplite_ray.shutdown()
""",
    )
    assert program.line() == "[6.0, 6.0, 6.0]"
    kill(lan[1], int(program.line()))
    program.go_on()
    assert program.line() == "True"
    assert program.line() == "whole"
    lan[2].kill()
    program.go_on()
    assert program.line() == "True"
    hosts.add(lan[2])  # the list has lost its third host, so this is h4
    program.go_on()
    assert program.line() == "1000.0"
    assert program.end() == []


def test_the_leading_actor_is_killed(hosts: RayHosts, lan: Lan) -> None:
    """The manager is not in it: Ray starts it again, it finds the cluster, and nobody notices."""
    program = hosts.program(
        lan[1],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        refs = [c.put(np.ones(n)) for n in (10, 1_000_000)]
        look = ray.remote(here)
        before = [ray.get(look.options(**on(h)).remote()) for h in (1, 2, 3)]
        nodes = c.nodes
        leader = ray.get_actor("leader", namespace="hoplite_mp")
        say(ray.get(leader.pid.remote()))
        heard()
        say(hoplite_ray.init() is c, [n.id for n in c.nodes] == [n.id for n in nodes])
        say(ray.get(leader.pid.remote()))
        say([ray.get(look.options(**on(h)).remote()) for h in (1, 2, 3)] == before)
        def totals(refs):
            return [float(x.sum()) for x in hoplite_mp.current().get(refs)]
        say([ray.get(ray.remote(totals).options(**on(h)).remote(refs)) for h in (1, 3)])
        heard()
        until(lambda: sorted(n.host for n in c.nodes) == ["h1", "h2", "h3", "h4"], "a new host")
        hoplite_ray.shutdown()
        say("ended")
        """,
    )
    killed = int(program.line())
    kill(lan[0], killed)
    program.go_on()
    assert program.line() == "True True"
    assert int(program.line()) != killed
    assert program.line() == "True"
    assert program.line() == str([[10.0, 1_000_000.0]] * 2)
    hosts.add(lan[3])  # it follows Ray as the one before did
    program.go_on()
    assert program.line() == "ended"
    assert program.end() == []
    for host in lan:
        until(lambda host=host: not processes(host, "sidecar_main"), "a sidecar is left")  # type: ignore[misc]


def test_the_manager_and_its_node_are_killed(hosts: RayHosts, lan: Lan) -> None:
    """All objects are gone, calls say so; the next init() gives a new cluster, also to tasks."""
    program = hosts.program(
        lan[1],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        ref = c.put(np.ones(1_000_000))
        view = c.get(ref)
        look = ray.remote(here)
        for h in (1, 2, 3):
            ray.get(look.options(**on(h)).remote())
        say("kill")
        heard()
        begun = time.monotonic()
        def ended():
            try:
                c.put(1)
            except hoplite_mp.errors.NodeLostError:
                return True
        until(ended, "the end of the cluster")
        say(time.monotonic() - begun < 30, float(view.sum()))
        d = hoplite_ray.init()
        say(sorted(n.host for n in d.nodes), d is c, hoplite_mp.current() is d)
        def total(refs):
            c = hoplite_mp.current()
            return c.put(c.get(refs[0]) * 2)
        total = ray.remote(total)
        mine = d.put(np.ones(1_000_000))
        # The processes that took part in the old one take part in the new one.
        parts = [ray.get(total.options(**on(h)).remote([mine])) for h in (1, 2, 3)]
        say(float(d.get(d.reduce(parts))[-1]))
        hoplite_ray.shutdown()
        """,
    )
    assert program.line() == "kill"
    (sidecar,) = processes(lan[0], "sidecar_main")
    kill(lan[0], sidecar)
    program.go_on()
    assert program.line() == "True 1000000.0"
    assert program.line() == "['h1', 'h2', 'h3'] False True"
    assert program.line() == "6.0"
    assert program.end() == []


def test_the_head_of_ray_is_killed_with_our_manager(hosts: RayHosts, lan: Lan) -> None:
    """They share one host, and Ray ends with its head. Nobody hangs."""
    program = hosts.program(
        lan[1],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        ref = c.put(np.ones(1_000_000))
        view = c.get(ref)
        group = c.group("never", size=2, rank=0)
        say("kill")
        heard()
        begun = time.monotonic()
        try:
            group.allreduce(1.0)
        except hoplite_mp.HopliteError as error:
            say(type(error).__name__, time.monotonic() - begun < 40)
        until(lambda: c._host.ended.is_set(), "the node lives on")
        try:
            c.put(1)
        except hoplite_mp.NodeLostError:
            say("over", float(view.sum()))
        os._exit(0)
        """,
    )
    assert program.line() == "kill"
    others = list(lan)[1:3]
    lan[0].kill()
    program.go_on()
    first, second = program.end()
    assert first.endswith(" True")
    assert second == "over 1000000.0"
    for host in others:
        until(lambda host=host: not processes(host, "sidecar_main"), "a sidecar is left")  # type: ignore[misc]


def test_a_node_is_killed_and_its_host_takes_part_again(hosts: RayHosts, lan: Lan) -> None:
    program = hosts.program(
        lan[0],
        """
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == 3, "three nodes of Ray")
        c = hoplite_ray.init(memory="100MiB")
        look = ray.remote(here)
        say(ray.get(look.options(**on(2)).remote())[1] > 0)
        heard()
        def again():
            try:
                return len(c.nodes) == 3 and ray.get(look.options(**on(2)).remote())[0] == "h2"
            except ray.exceptions.RayTaskError:
                return False
        until(again, "a node on h2")
        say("again")
        hoplite_ray.shutdown()
        """,
    )
    assert program.line() == "True"
    (pid,) = processes(lan[1], "hoplite node")
    kill(lan[1], pid)
    program.go_on()
    assert program.line() == "again"
    assert program.end() == []
