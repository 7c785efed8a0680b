"""Bounded allreduces of Groups whose members are on several emulated hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import run_members

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

WORKERS = 0  # of each host's

LATE = """
    for items in (1, 7, 300_000):
        g.allreduce(0, deadline=60, num=size)
        if rank == 2:
            assert g.recv(source=0) == "go on"
        for call in range(2):
            total = g.allreduce(np.full(items, 10.0 ** rank), deadline=0.05, num=2)
            assert g.contributors == (0, 1), g.contributors
            assert np.all(total == 11.0)
        if rank == 0:
            g.send("go on", 2)
        total = g.allreduce(np.full(items, 10.0 ** rank), deadline=60, num=size)
        assert np.all(total == 111.0)
    say("all", g.allreduce(1))
"""


def test_a_late_member_on_another_host_gets_what_it_missed(cluster: UpCluster, lan: Lan) -> None:
    assert run_members(cluster, lan, "bounded", LATE) == [["all 3"]] * 3
