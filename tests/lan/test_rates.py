"""Links of different speeds: what is learnt of them by use changes who passes on how much."""

from __future__ import annotations

import subprocess
from itertools import pairwise

import pytest

from tests.lan import Lan
from tests.support.clusters import UpCluster

PROGRAM = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
hosts = [node for node in c.nodes if node.workers]
slow = next(node for node in hosts if node.host == "h3")
def make(seed):
    return np.random.default_rng(seed).integers(-1000, 1000, 4 << 20, np.int32)
def allreduce():
    futures = [c.options(node=node).submit(make, i) for i, node in enumerate(hosts)]
    c.wait(futures)
    before = c.stats()["nodes"][slow.id]["bytes_sent"]
    total = c.allreduce(futures, to=hosts)
    c.wait(total)
    sent = c.stats()["nodes"][slow.id]["bytes_sent"] - before
    assert np.array_equal(c.get(total), sum(make(i) for i in range(3)))
    return sent
print([allreduce() / (16 << 20) for _ in range(4)])
"""


@pytest.mark.soak  # a burst on busy cores says nothing of links
def test_a_slow_host_owns_less_once_that_is_known(lan_permitted: None) -> None:
    """Alike, each of three sends 4/3 of the object; one whose link is a fifth only its own."""
    with Lan(3, "1gbit") as lan:
        lan[2].shape("200mbit", "200mbit")
        cluster = UpCluster(lan, tls=False)
        (line,) = cluster.run(lan[0], PROGRAM).splitlines()
        first, *_, last = eval(line)
        assert cluster.end() == [0, 0, 0]
    assert first > 1.3
    assert last < 1.1


BROADCASTS = """
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 4 and time.monotonic() < deadline:
    time.sleep(0.02)
hosts = {node.host: node for node in c.nodes if node.workers}
def make(seed):
    return np.random.default_rng(seed).integers(-1000, 1000, 4 << 20, np.int32)
def same(array, seed):
    return np.array_equal(array, make(seed))
for seed in range(12):
    ref = c.options(node=hosts["h1"]).submit(make, seed)
    c.broadcast(ref, to=list(hosts.values())).result(60)
    assert all(c.options(node=node).submit(same, ref, seed).result(60) for node in hosts.values())
    del ref
    time.sleep(0.7)
    print(seed, flush=True)
"""


@pytest.mark.soak  # a burst on busy cores says nothing of links
def test_little_goes_along_a_narrow_path_once_that_is_known(lan_permitted: None) -> None:
    """Of each stripe, a third of the object, one lies on the path between the first two hosts."""
    with Lan(4, "400mbit") as lan:
        lan[1].narrow(lan[0], "40mbit")
        cluster = UpCluster(lan, tls=False)  # threads of TLS take turns at the interpreter
        path = [lan[1].came_from(lan[0])]
        env = cluster.driver_env(lan[0])
        command = cluster.program(BROADCASTS)
        program = lan[0].popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(12):
            assert program.stdout is not None
            program.stdout.readline()
            path.append(lan[1].came_from(lan[0]))
        assert program.wait(60) == 0
        assert cluster.end() == [0, 0, 0, 0]
    shares = [(after - before) / (16 << 20) for before, after in pairwise(path)]
    assert shares[0] > 0.3
    assert shares[-1] < 0.1
