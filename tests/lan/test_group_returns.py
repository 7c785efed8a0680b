"""Tasks that come back to a Group that has ended: run again for a lost result, or while the manager
changes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import Driver, StandbyCluster
from tests.support.lan_programs import run_with_losses

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("as_users_start_them")


@pytest.mark.usefixtures("lan_permitted")
def test_a_task_whose_result_is_lost_learns_that_its_group_has_ended(tmp_path: Path) -> None:
    """At once, and so does who asks for the result."""
    said = run_with_losses(
        3,
        tmp_path,
        """
        def member(name, rank):
            with hoplite_mp.current().group(name, 2, rank) as g:
                g.barrier()
            return np.full(200_000, float(rank))
        def busy(name):
            open(GATE + name, "w").close()
            while not os.path.exists(GATE):
                time.sleep(0.005)
        held = c.options(node=ids["h2"]).submit(busy, "h2")
        while not os.path.exists(GATE + "h2"):
            time.sleep(0.005)
        stays = c.options(node=ids["h1"]).submit(member, "ended", 0)
        while not stays.running():
            time.sleep(0.005)
        goes = c.submit(member, "ended", 1)
        c.wait([stays, goes])
        open(GATE, "w").close()
        c.wait([held])
        assert c.locations(goes.ref) == [ids["h3"]], c.locations(goes.ref)
        killed("h3")
        begun = time.monotonic()
        try:
            c.get(goes, timeout=60)
        except hoplite_mp.PeerLostError as error:
            print("has ended: this task was a member before its retry" in str(error))
        print(time.monotonic() - begun < 40)
        """,
    )
    assert said == ["True", "True"]


REJOINS = """
import pathlib, signal
deadline = time.monotonic() + 30
while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
    time.sleep(0.02)
hosts = {n.host: n for n in c.nodes if n.workers}
first = hosts["h1"].id
folder = pathlib.Path("FOLDER")
def member(rank):
    again = (folder / f"was-{rank}").exists()
    try:
        with hoplite_mp.current().group("left", 2, rank) as g:
            (folder / f"asks-{rank}-{int(again)}").touch()
            found = g.allgather(rank)
    except hoplite_mp.PeerLostError as error:
        return str(error)
    if rank and not again:
        (folder / f"was-{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "open").exists():
        time.sleep(0.01)
    return found
pools = [c.executor(1, node=hosts[h]) for h in ("h2", "h3")]
futures = [pool.submit(member, rank) for rank, pool in enumerate(pools)]
deadline = time.monotonic() + 30
while not (folder / "asks-1-1").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
print("ready", sum(future.done() for future in futures), flush=True)
input()
deadline = time.monotonic() + 30
while first in [n.id for n in c.nodes] and time.monotonic() < deadline:
    time.sleep(0.05)
print("without", sum(future.done() for future in futures), flush=True)
(folder / "open").touch()
print(futures[0].result(40), flush=True)
begun = time.monotonic()
text = futures[1].result(40)
print("has ended: this task was a member before" in text, time.monotonic() - begun < 30, flush=True)
"""


@pytest.mark.usefixtures("lan_permitted", "usual_heartbeats")
def test_the_standby_takes_over_while_one_waits(tmp_path: Path) -> None:
    """The manager's host dies after a member, tried again, has begun to wait for a task that still
    runs; when that is over the member hears of it from the next manager."""
    with Lan(3) as lan:
        cluster = StandbyCluster(lan)
        cluster.wait_for_standby()
        with Driver(cluster, lan[2], REJOINS.replace("FOLDER", str(tmp_path))) as driver:
            assert driver.hear() == "ready 0"
            lan[0].kill()
            begun = time.monotonic()
            driver.say()
            assert driver.hear() == "without 0"
            assert driver.hear() == "[0, 1]"
            assert driver.hear() == "True True"
            assert time.monotonic() - begun < 60
        assert cluster.end_standby() == [0, 0]
