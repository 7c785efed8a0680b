"""Tasks of one host with priorities that run on another: higher ones begin first there, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._node.tasks.outbound_tasks import AHEAD_TASKS
from tests.lan import Lan
from tests.support.clusters import UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster(lan_permitted: None) -> Iterator[UpCluster]:
    """The first host has no workers, the second one has one."""
    with Lan(2) as lan:
        made = UpCluster(lan, tls=False, workers=0, joins=0)
        made.joined = [made.join(lan[1], 1)]
        yield made
        assert made.end() == [0, 0]


def test_higher_ones_begin_first(cluster: UpCluster) -> None:
    """Than those of lower ones that have not been sent ahead to the other host: two at most."""
    out = cluster.run(
        cluster.lan[0],
        """
import itertools, tempfile
deadline = time.monotonic() + 30
while not sum(n.workers for n in c.nodes) and time.monotonic() < deadline:
    time.sleep(0.02)
path = os.path.join(tempfile.mkdtemp(), "open")  # hosts share the disk
def hold():
    open(path + ".held", "w").close()
    while not os.path.exists(path):
        time.sleep(0.002)
def begun(_):
    return time.monotonic_ns(), os.uname().nodename
held = c.options(priority=1 << 30).submit(hold)
while not os.path.exists(path + ".held"):
    time.sleep(0.002)
priorities = [0] * 40 + [3] * 5 + [-1] * 5 + [1, 7]
futures = [c.options(priority=one).submit(begun, one) for one in priorities]
open(path, "w").close()
found = [future.result(30) for future in futures]
print(*{host for _, host in found})
places = sorted(range(len(found)), key=lambda at: found[at])
order = [priorities[at] for at in places]
print(order.index(7) <= AHEAD)
ahead = itertools.combinations(range(len(order)), AHEAD)  # those that had gone, of any priority
rests = ([one for at, one in enumerate(order) if at not in gone] for gone in ahead)
print(any(rest == sorted(rest, reverse=True) for rest in rests))
equals = [at for at in places if priorities[at] == 3]
print(equals == sorted(equals))
""".replace("AHEAD", str(AHEAD_TASKS)),
    )
    assert out.splitlines() == ["h2", "True", "True", "True"]
