"""Dask on several hosts, with a node beside the workers of each; hosts, workers and nodes die."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.engines.dask_hosts import DaskHosts
from tests.engines.programs import Logs, kill, processes, until
from tests.lan import Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture
def lan() -> Iterator[Lan]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no emulated hosts: {reason}")
    with Lan(4) as made:
        yield made


@pytest.fixture
def hosts(lan: Lan, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[DaskHosts]:
    """A scheduler on h1, two workers on each of h2 and h3; h4 is empty."""
    logs = Logs(tmp_path / "logs")
    made = DaskHosts(lan, logs)
    for host in (lan[1], lan[2]):
        made.add_workers(host, 2)
    yield made
    print(logs.said())  # pytest shows it if the test has failed


def test_nodes_are_shared_and_values_too(hosts: DaskHosts, lan: Lan) -> None:
    """From a client whose host had none of Dask's processes."""
    out = hosts.run(
        lan[3],
        """
        c = hoplite_dask.init(client)
        say(sorted(node.host for node in c.nodes), [node.workers for node in c.nodes])
        found = client.run(here)
        by_host = {}
        for name, pid, node, attached in found.values():
            assert attached
            by_host.setdefault(name, set()).add(node)
        say({name: len(nodes) for name, nodes in sorted(by_host.items())})
        say(hoplite_dask.init(client) is c, len(c.nodes))

        name_of = {node.id: node.host for node in c.nodes}
        def used():
            counts = c.stats()["nodes"]
            return {name_of[n]: one["bytes_used"] >> 20 for n, one in counts.items()}
        before = used()
        big = hoplite_dask.broadcast(client, np.ones(4 << 20))
        def more():
            return {name: n - before[name] for name, n in used().items()}
        # Where there are no workers nobody reads it, so it goes again.
        until(lambda: more()["h1"] == more()["h4"] == 0, "a copy stays that nobody wants")
        say(len(client.who_has(big)[big.key]), more()["h2"], more()["h3"])
        def look(x):
            return type(x).__name__, x.flags.writeable, float(x.sum())
        say({client.submit(look, big, pure=False, workers=[w]).result()
             for host in (2, 3) for w in on(host)})

        refs = client.map(put, range(6), pure=False)
        say(client.gather(client.map(total_of, refs)))
        mine = c.put(np.arange(100_000.0))
        say(client.submit(total_of, mine).result() == c.get(mine).sum())
        again = refs[3].result()
        del refs
        say(float(c.get(again)[0]))

        parts = client.map(lambda i: np.full(300_000, float(i)), range(8))
        total = hoplite_dask.reduce(client, parts)
        say(float(total.result()[7]), total.contributors)
        def slow(i):
            time.sleep(60 * (i == 2))
            return np.full(10, float(i))
        first = hoplite_dask.reduce(client, client.map(slow, range(4)), "max", num=3)
        say(float(first.result()[0]), first.contributors)

        def member(rank):
            with hoplite_mp.current().group("dask", size=3, rank=rank) as g:
                return float(g.allreduce(np.full(4, rank + 1.0))[0])
        say(client.gather(client.map(member, range(3))))
        """,
    )
    assert out[0] == "['h1', 'h2', 'h3', 'h4'] [0, 0, 0, 0]"
    assert out[1] == "{'h2': 1, 'h3': 1}"
    assert out[2] == "True 4"
    assert out[3] == "4 32 32"  # one copy for the two workers of a host
    assert out[4] == "{('ndarray', False, 4194304.0)}"
    assert out[5] == str([300_000.0 * i for i in range(6)])
    assert out[6:8] == ["True", "3.0"]
    assert out[8] == "28.0 (0, 1, 2, 3, 4, 5, 6, 7)"
    assert out[9] == "3.0 (0, 1, 3)"
    assert out[10] == "[6.0, 6.0, 6.0]"
    assert processes(lan[1], "sidecar_main") != []


def test_workers_and_nodes_come_and_go(hosts: DaskHosts, lan: Lan) -> None:
    """A worker is killed, then a node; then a host is added, and retired."""
    client = hosts.program(
        lan[0],
        """
        c = hoplite_dask.init(client)
        say(sorted(node.host for node in c.nodes))

        def in_part(host):
            found = client.run(here, workers=on(host), on_error="ignore")
            return {pid: node for _, pid, node, attached in found.values() if attached}

        def all_in_part(host, gone=()):
            found = in_part(host)
            return len(found) == 2 and not {*found} & {*gone}

        # Dask's nanny starts a killed worker again: it finds the node of its host, and what was
        # put there is still there.
        kept = client.submit(put, 5, workers=on(2), pure=False).result()
        (node,) = {*in_part(2).values()}
        victim = client.run(os.getpid, workers=on(2)[:1])
        client.run(lambda: os.kill(os.getpid(), signal.SIGKILL), workers=on(2)[:1],
                   on_error="ignore")
        until(lambda: all_in_part(2, victim.values()), "the worker is not back")
        say({*in_part(2).values()} == {node})
        say(client.submit(total_of, kept, workers=on(2)).result())
        say("kill the sidecar")
        heard()

        # Workers whose node has ended take part through another one.
        until(lambda: all_in_part(2) and node not in in_part(2).values(), "no other node")
        (other,) = {*in_part(2).values()}
        again = client.submit(put, 6, workers=on(2), pure=False).result()
        say(other > node, client.submit(total_of, again, workers=on(3)).result())
        say("add a host")
        heard()

        until(lambda: len(on(4)) == 1 and len(in_part(4)) == 1, "the host does not join")
        say(sorted(node.host for node in c.nodes))
        late = client.submit(put, 7, workers=on(4), pure=False)
        far = late.result()
        ours = hoplite_dask.broadcast(client, np.ones(100_000))
        say(client.submit(np.sum, ours, workers=on(4)).result())
        client.retire_workers(on(4))
        until(lambda: "h4" not in {node.host for node in c.nodes}, "the node does not leave")
        say(sorted(node.host for node in c.nodes))
        say(float(c.get(far)[0]), client.submit(total_of, far).result())
        """,
    )
    assert client.line() == "['h1', 'h2', 'h3']"
    assert client.line() == "True"
    assert client.line() == str(5 * 300_000.0)
    assert client.line() == "kill the sidecar"
    (sidecar,) = processes(lan[1], "sidecar_main")
    kill(lan[1], sidecar)
    client.go_on()
    assert client.line() == f"True {6 * 300_000.0}"
    assert client.line() == "add a host"
    hosts.add_workers(lan[3])
    client.go_on()
    assert client.line() == "['h1', 'h2', 'h3', 'h4']"
    assert client.line() == "100000.0"
    assert client.line() == "['h1', 'h2', 'h3']"
    assert client.end() == [f"7.0 {7 * 300_000.0}"]
    until(lambda: not processes(lan[3], "sidecar_main"), "a sidecar is left")


def test_a_host_is_killed_in_the_middle(hosts: DaskHosts, lan: Lan) -> None:
    """What it had is computed again, and each source goes in once."""
    client = hosts.program(
        lan[0],
        """
        c = hoplite_dask.init(client)
        def make(i):
            time.sleep(0.2)
            return np.full(2_000_000, float(i))
        # So many are made on the host that dies, the others wait for something of it.
        parts = client.map(make, range(12), pure=False)
        wait(parts)
        gate = hoplite_dask.broadcast(client, np.ones(1000))
        def held(x, i):
            time.sleep(3.0)
            return np.full(2_000_000, float(i))
        late = client.map(held, [gate] * 4, range(12, 16), pure=False)
        total = hoplite_dask.reduce(client, [*parts, *late])
        some = hoplite_dask.reduce(client, [*parts, *late], "max", num=13)
        ref = client.submit(put, 3, workers=on(3), pure=False).result()
        say(sorted(node.host for node in c.nodes))
        heard()
        x = total.result(timeout=100)
        say(float(x[0]), float(x[-1]), total.contributors == tuple(range(16)))
        y = some.result(timeout=100)
        say(float(y[0]) == max(some.contributors), len(some.contributors))
        until(lambda: "h3" not in {node.host for node in c.nodes}, "the host is not missed")
        try:
            say(client.submit(total_of, ref).result(timeout=60))
        except hoplite_mp.ObjectLostError as error:
            say("lost", "ref_hold_s" in str(error) or "lost" in str(error))
        say(float(hoplite_dask.broadcast(client, np.ones(5)).result().sum()))
        """,
    )
    assert client.line() == "['h1', 'h2', 'h3']"
    lan[2].kill()
    client.go_on()
    lines = client.end()
    assert lines[0] == "120.0 120.0 True"
    assert lines[1] == "True 13"
    assert lines[2].startswith("lost True") or lines[2] == str(3 * 300_000.0)
    assert lines[3] == "5.0"


def test_the_scheduler_and_our_manager_are_killed(hosts: DaskHosts, lan: Lan) -> None:
    """They share one host. Nobody hangs: waits end with errors, and nodes with the cluster."""
    client = hosts.program(
        lan[3],
        """
        c = hoplite_dask.init(client)
        mine = c.put(np.arange(1000.0))
        view = c.get(mine)
        say(len(c.nodes))
        group = c.group("never", size=2, rank=0)
        heard()
        begun = time.monotonic()
        try:
            group.allreduce(1.0)
        except (hoplite_mp.HopliteError, ConnectionError) as error:
            say(type(error).__name__, time.monotonic() - begun < 60)
        until(lambda: c._host.ended.is_set(), "the node lives on")
        try:
            c.put(1)
            c.get(c.reduce([c.put(1)]))
        except hoplite_mp.HopliteError as error:
            say("over")
        say(float(view.sum()))
        os._exit(0)
        """,
    )
    assert client.line() == "4"
    assert processes(lan[1], "sidecar_main") != []
    lan[0].kill()
    client.go_on()
    lines = client.end()
    assert lines[0].endswith(" True")
    assert lines[1:] == ["over", "499500.0"]
    for host in (host for host in lan if host.number in (2, 3)):
        until(lambda host=host: not processes(host, "sidecar_main"), "a sidecar is left")  # type: ignore[misc]
