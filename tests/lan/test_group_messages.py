"""Messages between members of a Group on several emulated hosts; scatter, scans and split there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import TLS_OR_PLAIN, UpCluster
from tests.support.lan_programs import HOSTS, run_members

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(HOSTS) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    made = UpCluster(lan, tls=request.param, workers=0)
    yield made
    assert made.end() == [0, 0, 0]


CALLS = """
    for shape in ((7,), (300, 1001)):
        parts = arrays("x", shape)
        mine = parts[rank]
        give = [mine + j for j in range(size)]
        got = g.scatter(give if rank == 1 else None, root=1)
        assert got.flags.writeable and np.array_equal(got, parts[1] + rank)
        out = np.empty(shape, np.float32)
        assert g.scatter(give if rank == 2 else None, root=2, out=out) is out
        assert np.array_equal(out, parts[2] + rank)
        folded = parts[0]
        for other in parts[1:rank + 1]:
            folded = folded + other
        got = g.scan(mine)
        assert got.flags.writeable and got.tobytes() == folded.tobytes()
        g.scan(mine, out=out)
        assert out.tobytes() == folded.tobytes()
        got = g.exscan(mine, op="max")
        assert (got is None) == (rank == 0)
        assert rank == 0 or np.array_equal(got, np.max(parts[:rank], axis=0))
        got = g.scan_async(mine, op="mean").result()
        assert np.allclose(got, folded / (rank + 1), rtol=1e-5)
    got = g.scatter([{"to": r} for r in range(size)] if rank == 0 else None)
    assert got == {"to": rank}
    try:
        g.scan(np.ones(5 + (rank == 1) * 200_000))
        say("nothing")
    except ValueError as error:
        say(error)
    say(g.scan(rank), g.calls)
"""


@pytest.mark.parametrize("per_host", [1, 2])
def test_scatter_and_scans(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    found = run_members(cluster, lan, f"kinds {per_host}", CALLS, per_host)
    assert [one[1] for one in found] == [f"{r * (r + 1) // 2} 15" for r in range(HOSTS * per_host)]
    assert len({one[0] for one in found}) == 1
    assert found[0][0] == (
        "rank 0 has shape (5,) and dtype float64, rank 1 has shape (200005,) and dtype float64"
    )


SPLIT = """
    part = g.split(rank % 2, key=-rank)
    say(part.rank, part.size, part.allreduce(rank), part.contributors)
    assert (g.split(None if rank == 0 else 5) is None) == (rank == 0)
    part.send(("in the part", rank), (part.rank + 1) % part.size)
    say(part.recv()[1])
    again = part.split(part.rank)
    say(again.size, again.allreduce(np.ones(200_000))[0])
    part.close()
    again.close()
    say(g.allreduce(1))
"""


def test_split(cluster: UpCluster, lan: Lan) -> None:
    found = run_members(cluster, lan, "split", SPLIT, 2)
    even, odd = (0, 2, 4), (1, 3, 5)
    for rank, said in enumerate(found):
        same = even if rank % 2 == 0 else odd
        new = same[::-1].index(rank)
        before = same[::-1][new - 1]
        assert said == [f"{new} 3 {sum(same)} (0, 1, 2)", str(before), "1 1.0", "6"]


MESSAGES = """
    right, left = (rank + 1) % size, (rank - 1) % size
    # Large ones overtake nothing: small, large, small of one pair.
    for at in range(12):
        g.send((at, np.full((10, 30_000, 1_000_000)[at % 3], at)), right, tag=at % 2)
    for tag in (1, 0):
        for at in range(tag, 12, 2):
            got = g.recv(left, tag, timeout=20)
            assert got[0] == at and got[1].flags.writeable and (got[1] == at).all(), (at, got[0])
    g.barrier()
    assert g.probe(timeout=0) is None
    g.barrier()
    ref = c.put(np.full(200_000, rank))
    g.send({"ref": ref}, left, tag=5)
    del ref
    got, source = g.recv(tag=5, timeout=20, with_source=True)
    say(source == right, c.get(got["ref"]).max() == right)
    later = [g.recv_async(source, 6) for source in range(size)]
    for to in range(size):
        g.send((rank, to), to, tag=6)
    say([f.result(20) for f in later] == [(r, rank) for r in range(size)])
    g.barrier()
"""


@pytest.mark.parametrize("per_host", [1, 2])
def test_messages(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    found = run_members(cluster, lan, f"messages {per_host}", MESSAGES, per_host)
    assert found == [["True True", "True"]] * HOSTS * per_host


def test_what_a_member_has_sent_before_it_died_comes_first(cluster: UpCluster, lan: Lan) -> None:
    program = """
        g.barrier()
        if rank == 2:
            for at in range(20):
                g.send((at, np.zeros((1, 20_000, 400_000)[at % 3])), at % 2)
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        got = []
        try:
            while True:
                got.append(g.recv(2)[0])
        except hoplite_mp.PeerLostError:
            pass
        say(got == list(range(rank, 20, 2)), g.recv_async(2).exception(20) is not None)
        g.send("to the living", 1 - rank)
        say(g.recv())
        try:
            g.send(1, 2)
        except hoplite_mp.PeerLostError as error:
            say("rank 2 has left or died" in str(error))
        """
    found = run_members(cluster, lan, "dies", program)
    assert found == [["True True", "to the living", "True"]] * 2


def test_who_leaves_first_has_sent_all(cluster: UpCluster, lan: Lan) -> None:
    program = """
        if rank == 0:
            for at in range(10):
                g.send(np.full(100_000, at), 1 + at % 2)
            return
        got = []
        try:
            while True:
                got.append(int(g.recv(0)[0]))
        except hoplite_mp.PeerLostError:
            say(got)
        """
    found = run_members(cluster, lan, "leaves", program)
    assert found[0] == [""]
    assert [one[0] for one in found[1:]] == ["[0, 2, 4, 6, 8]", "[1, 3, 5, 7, 9]"]
