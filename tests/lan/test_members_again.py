"""Members of a Group that die and come again, on their own host and on one that had none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import TLS_OR_PLAIN, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan_permitted: None, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    with Lan(3) as lan:
        made = UpCluster(lan, tls=request.param)
        yield made
        assert made.end() == [0, 0, 0]


@pytest.mark.parametrize("count", [pytest.param(10, marks=pytest.mark.soak), 300_000])
def test_a_member_comes_again(cluster: UpCluster, count: int) -> None:
    """Two stay on the first host and call all the time; the third comes to the second host, to the
    third, which has never heard of a call, and to the second again, and dies after three calls."""
    out = cluster.run(
        cluster.lan[0],
        WAIT_FOR_ALL
        + f"""
import signal, tempfile
count = {count}
name = "again {count}"
folder = tempfile.mkdtemp()  # hosts share the disk
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def stay(rank):
    seen = []
    with hoplite_mp.current().group(name, 3, rank, timeout=30) as g:
        while len(seen) < 7:
            got = g.allreduce(np.ones(count))
            assert got[0] == got[-1] == len(g.contributors), (got, g.contributors)
            if not seen or seen[-1] != g.contributors:
                seen.append(g.contributors)
                open(f"{{folder}}/{{rank}}.{{len(seen)}}", "w").close()
            time.sleep(0.005)
    return seen
def come(dies):
    with hoplite_mp.current().group(name, 3, 2, timeout=30) as g:
        for _ in range(3):
            got = g.allreduce(np.ones(count))
            assert got[0] == got[-1] == len(g.contributors)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        while len(g.contributors) > 1:
            g.allreduce(np.ones(count))
pool = c.executor(2, node=hosts[0])
staying = [pool.submit(stay, rank) for rank in range(2)]
for turn, number in enumerate((1, 2, 1), 1):
    with c.executor(1, node=hosts[number]) as there:
        died = there.options(retries=0).submit(come, True).exception(40)
        assert type(died) is hoplite_mp.WorkerLostError, died
    while not all(os.path.exists(f"{{folder}}/{{rank}}.{{2 * turn}}") for rank in range(2)):
        time.sleep(0.01)  # until the others have made a call alone
there = c.executor(1, node=hosts[2])
last = there.submit(come, False)
for future in staying:
    print(*map(len, future.result(40)))
""",
    )
    assert out.splitlines() == ["3 2 3 2 3 2 3"] * 2


def test_one_of_two_dies_while_a_call_has_begun_without_it(cluster: UpCluster) -> None:
    """Its neighbour on the host, and the others, end that call without it."""
    out = cluster.run(
        cluster.lan[0],
        WAIT_FOR_ALL
        + """
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
import signal
where = [hosts[0], hosts[1], hosts[2], hosts[2]]
def received():
    counted = hoplite_mp.current().stats()["nodes"].values()
    return sum(one["bytes_received"] for one in counted)
def member(rank):
    mine = np.full(1 << 21, rank + 1, np.float32)
    with hoplite_mp.current().group("neighbours", 4, rank, timeout=30) as g:
        before = received()
        g.barrier()
        if rank == 3:
            deadline = time.monotonic() + 20
            while received() - before < mine.nbytes // 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            got = g.allreduce(mine)
            assert np.all(got == sum(r + 1 for r in g.contributors))
        return g.contributors
pools = [c.executor(1, node=node) for node in where]
futures = [pool.options(retries=0).submit(member, r) for r, pool in enumerate(pools)]
for future in futures[:3]:
    print(*future.result(40))
print(type(futures[3].exception(40)).__name__)
""",
    )
    assert out.splitlines() == ["0 1 2"] * 3 + ["WorkerLostError"]


def test_members_that_come_back_after_they_have_left(cluster: UpCluster) -> None:
    """One on each host. Two die after they have left, and are tried again: while the third one
    runs it could come, too, so they wait; when it is over both learn so."""
    out = cluster.run(
        cluster.lan[0],
        WAIT_FOR_ALL
        + """
import pathlib, signal, tempfile
folder = pathlib.Path(tempfile.mkdtemp())
hosts = sorted((n for n in c.nodes if n.workers), key=lambda node: node.host)
def member(rank):
    again = (folder / f"was-{rank}").exists()
    (folder / f"asks-{rank}-{int(again)}").touch()
    try:
        with hoplite_mp.current().group("left", 3, rank) as g:
            found = g.allgather(rank)
    except hoplite_mp.PeerLostError as error:
        return str(error)
    if rank and not again:
        (folder / f"was-{rank}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    while not (folder / "open").exists():
        time.sleep(0.01)
    return found
pools = [c.executor(1, node=node) for node in hosts]
futures = [pool.submit(member, rank) for rank, pool in enumerate(pools)]
deadline = time.monotonic() + 20
while len(list(folder.glob("asks-*-1"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
print(sum(future.done() for future in futures))
(folder / "open").touch()
print(futures[0].result(20))
begun = time.monotonic()
for future in futures[1:]:
    print("has ended" in future.result(40), time.monotonic() - begun < 30)
for each in folder.iterdir():
    each.unlink()
folder.rmdir()
""",
    )
    assert out.splitlines() == ["0", "[0, 1, 2]", "True True", "True True"]
