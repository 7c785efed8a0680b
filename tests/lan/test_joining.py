"""A host joins while managers die: it is let in by one of the next."""

from __future__ import annotations

import signal
import time

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, UpCluster, kill_manager, signal_all

WAIT = """
deadline = time.monotonic() + 30
while len([n for n in c.nodes if n.workers]) < {count} and time.monotonic() < deadline:
    time.sleep(0.02)
print(len([n for n in c.nodes if n.workers]))
"""
GONE = """
deadline = time.monotonic() + 30
while "h1" in [n.id for n in c.nodes] and time.monotonic() < deadline:
    time.sleep(0.02)
"""


def test_the_node_alone_is_killed(lan_permitted: None) -> None:
    """As by the out-of-memory killer: `join` begins another life, `up` says that something is
    wrong."""
    with Lan(2) as lan:
        cluster = UpCluster(lan, tls=False)
        assert cluster.run(lan[0], WAIT.format(count=2)) == "2\n"
        assert lan[1].run(["pkill", "-KILL", "-x", "hoplite node"]).returncode == 0
        out = cluster.run(lan[0], GONE + WAIT.format(count=2))
        assert out == "2\n"
        assert cluster.joined[0].poll() is None
        assert lan[0].run(["pkill", "-KILL", "-x", "hoplite node"]).returncode == 0
        assert cluster.up.wait(PATIENCE_S) == 1
        assert cluster.joined[0].wait(PATIENCE_S) == 0
        assert cluster.up.stdout is not None
        cluster.up.stdout.close()


@pytest.mark.soak
def test_the_manager_dies_while_it_lets_a_host_in(lan_permitted: None) -> None:
    """The second one waits for a host that is stopped, and dies before it lets in the new one."""
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        assert cluster.run(lan[0], WAIT.format(count=3)) == "3\n"
        for number in range(4, 8):
            host = lan.add(number)
            signal_all(lan[1], signal.SIGSTOP)
            kill_manager(lan[0])
            joining = cluster.join(host, 1)
            time.sleep(1.2)  # it has been heard by then, or is met by the next one
            kill_manager(lan[0])
            signal_all(lan[1], signal.SIGCONT)
            assert cluster.run(lan[0], WAIT.format(count=4)) == "4\n", number
            assert joining.poll() is None
            host.kill()
            assert cluster.run(lan[0], WAIT.format(count=3)) == "3\n", number
            time.sleep(3.0)  # a manager that dies too often is not started again
        assert cluster.end()[0] == 0
