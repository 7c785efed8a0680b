"""Links of different speeds: what is learnt of them by use changes who passes on how much."""

from __future__ import annotations

import pytest

from tests.lan import Lan
from tests.lan.test_cluster import UpCluster

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
    with Lan(3, "500mbit") as lan:
        lan[2].shape("100mbit", "100mbit")
        cluster = UpCluster(lan, tls=False)
        (line,) = cluster.run(lan[0], PROGRAM).splitlines()
        first, *_, last = eval(line)
        assert cluster.end() == [0, 0, 0]
    assert first > 1.3
    assert last < 1.1
