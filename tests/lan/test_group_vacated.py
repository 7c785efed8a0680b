"""A peer that leaves its Group before the peers on other hosts have joined."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


@pytest.mark.parametrize("how", ["kill", "raise", "return"])
def test_the_others_raise_at_once_when_a_peer_on_another_host_left_early(
    cluster: UpCluster, lan: Lan, how: str
) -> None:
    out = cluster.run(
        lan[1],
        WAIT_FOR_ALL
        + f"""
import signal, tempfile
gate = tempfile.mkdtemp() + "/left"  # hosts share the disk
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def peer(rank, name, alone):
    if rank == 2 or (alone and rank):
        while not os.path.exists(gate + name):
            time.sleep(0.01)
    begun = time.monotonic()
    try:
        g = hoplite_mp.current().group(name, 3, rank)
        if rank == 0:
            while not alone and g.alive != (0, 1):
                time.sleep(0.01)
            if "{how}" == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if "{how}" == "raise":
                raise KeyError(rank)
            return os.uname().nodename
        g.allreduce(1.0)
    except hoplite_mp.PeerLostError as error:
        assert "can never have all its 3 members: rank 0 has left or died" in str(error), error
        assert time.monotonic() - begun < 30
        return os.uname().nodename
for alone in (False, True):
    name = f"early {how} {{alone}}"
    peers = c.options(node=hosts, retries=0).spmd(peer, 3, name, alone)
    c.wait(peers[:1])
    open(gate + name, "w").close()
    print(*sorted(f.result(40) for f in peers[1:]))
def wait_for(*paths):
    while not all(map(os.path.exists, paths)):
        time.sleep(0.01)
def twice(rank, name):
    again = os.path.exists(gate + name + " died")
    if rank:
        wait_for(gate + name)
    elif again:  # the others join while the rank is vacated
        open(gate + name, "w").close()
        wait_for(gate + name + "1", gate + name + "2")
    g = hoplite_mp.current().group(name, 3, rank)
    if rank:
        open(gate + name + str(rank), "w").close()
    elif not again:
        open(gate + name + " died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return g.allgather(rank)
if "{how}" == "kill":
    assert c.get(c.options(node=hosts).spmd(twice, 3, "again")) == [[0, 1, 2]] * 3
""",
    )
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(len(set(line.split())) == 2 for line in lines), "two other hosts"
