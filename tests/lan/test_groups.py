"""Groups whose members are on several emulated hosts: every call, time-outs, mistakes, deaths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.lan_programs import run_members

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster


WORKERS = 0  # of each host's


EVERY_CALL = """
    for shape in ((7,), (300, 1001)):
        parts = arrays("x", shape)
        mine = parts[rank]
        same = lambda got, expected: np.allclose(got, expected, rtol=1e-4, atol=1e-3)
        got = g.allreduce(mine, op="mean")
        assert got.flags.writeable and same(got, sum(parts) / size)
        assert g.contributors == tuple(range(size))
        got = g.reduce(mine, op="max", root=1)
        assert (got is None) == (rank != 1)
        assert rank != 1 or np.array_equal(got, np.max(parts, axis=0))
        out = np.empty(shape, np.float32)
        assert g.broadcast(mine if rank == 2 else None, root=2, out=out) is out
        assert np.array_equal(out, parts[2])
        got = g.gather(mine, root=0)
        assert (got is None) == (rank != 0)
        assert rank or all(np.array_equal(a, b) for a, b in zip(got, parts))
        got = g.allgather(mine)
        assert all(np.array_equal(a, b) for a, b in zip(got, parts))
        got = g.reduce_scatter(mine)
        assert same(got, np.array_split(sum(parts), size)[rank])
        got = g.alltoall([mine * (rank + 1) + j for j in range(size)])
        assert all(np.array_equal(got[i], parts[i] * (i + 1) + rank) for i in range(size))
        g.barrier()
        got = g.allreduce(mine, op=np.hypot)
        assert same(got, np.hypot.reduce(parts, axis=0))
    say("all", g.calls)
"""


def test_every_call(cluster: UpCluster, lan: Lan) -> None:
    assert run_members(cluster, lan, "every", EVERY_CALL) == [["all 18"]] * 3


def test_several_members_on_a_host(cluster: UpCluster, lan: Lan) -> None:
    assert run_members(cluster, lan, "several", EVERY_CALL, 2) == [["all 18"]] * 6


# Rank 1 makes each fifth call only after the others have told it that theirs has timed out. They
# write to their arrays at once, and join again.
TIMED = """
    def joined():
        timed = c.group("timed", size, rank, timeout=None if rank == 1 else 60)
        all_are_there(timed)
        return timed
    def all_are_there(timed):
        timed.barrier()
        while timed.contributors != tuple(range(size)):
            timed.barrier()
    timed, late = joined(), 0
    for call in range(25):
        items = [1, 3000, 130_000, 400_000, 1_200_000][call // 5]
        x = timed.empty(items) if call % 2 else np.empty(items)
        x[...] = 7 * rank + call
        is_late = call % 5 == 4
        if rank != 1:
            timed._member.timeout = 0.5 if is_late else 60.0
        elif is_late:
            assert [g.recv(other) for other in (0, 2)] == [call, call]
        try:
            got = timed.allreduce(x)
        except hoplite_mp.HopliteTimeoutError:
            x[...] = -1e9
            late += 1
            g.send(call, 1)
            timed = joined()
            continue
        assert np.all(got == sum(7 * r + call for r in timed.contributors)), (call, items)
        # The array of a rank that has timed out may still count, as it was before that.
        expected = {1} if is_late else {*range(size)}
        assert expected <= {*timed.contributors}, (rank, call, timed.contributors)
        if is_late:
            all_are_there(timed)
    g.barrier()
    timed.close()
    say(late)
"""


def test_members_that_time_out_leave_and_join_again(cluster: UpCluster, lan: Lan) -> None:
    assert run_members(cluster, lan, "beside", TIMED) == [["5"], ["0"], ["5"]]


IN_PLACE = """
    def lies(array):
        made = g.empty(array.shape, array.dtype, order="F" if rank % 2 else "C")
        made[...] = array
        return made
    same = lambda got, expected: np.array_equal(got, expected)
    for turn in range(2):
        for shape in ((20_000,), (300, 1001), (1_100_000,)):
            parts = arrays("x", shape)
            mine = lies(parts[rank])
            got = g.allreduce(mine)
            assert np.allclose(got, sum(parts), rtol=1e-4, atol=1e-3)
            total = g.allreduce(got)  # an earlier result
            assert np.allclose(total, size * got, rtol=1e-4, atol=1e-3)
            assert g.allreduce(mine, "max", out=mine) is mine
            assert same(mine, np.max(parts, axis=0))
            mine[...] = parts[rank]
            got = g.broadcast(mine, root=turn % size)
            mine[...] = -1
            assert got.flags.writeable and same(got, parts[turn % size])
            mine[...] = parts[rank]
            got = g.broadcast(mine, root=1, out=mine)
            assert got is mine and same(got, parts[1])
            mine[...] = parts[rank]
            got = g.allgather(mine)
            mine[...] = -1
            assert all(map(same, got, parts))
            mine[...] = parts[rank]
            got = g.gather(mine, root=0)
            mine[...] = -1
            assert rank or all(map(same, got, parts))
            mine[...] = parts[rank]
            got = g.scan(mine)
            mine[...] = -1
            assert same(got, sum(parts[1 : rank + 1], start=parts[0]))
            given = [lies(parts[rank] + j) for j in range(size)]
            got = g.alltoall(given)
            for one in given:
                one[...] = -1
            assert all(same(got[i], parts[i] + rank) for i in range(size))
            plain = parts[rank].copy()  # what was copied comes back as a new array
            for got in (g.broadcast(plain, root=turn % size), g.allgather(plain)[rank]):
                assert got.flags.writeable and not np.shares_memory(got, plain)
            assert same(got, plain)
    assert not g._calls._in_place.lends
    del got, mine, given, total, one
    say("all", g.calls)
"""


@pytest.mark.parametrize("per_host", [1, 2])
def test_arrays_that_lie_in_the_store(cluster: UpCluster, lan: Lan, per_host: int) -> None:
    found = run_members(cluster, lan, f"in place {per_host}", IN_PLACE, per_host)
    assert found == [["all 66"]] * 3 * per_host


def test_all_get_the_same_bits(cluster: UpCluster, lan: Lan) -> None:
    out = run_members(
        cluster,
        lan,
        "bits",
        """
        import hashlib
        for count in (11, 1_000_003):
            mine = arrays("x", (count,))[rank]
            for _ in range(3):
                mine = g.allreduce(mine, op="mean") * np.float32(1.25)
            say(hashlib.sha256(mine.tobytes()).hexdigest())
        """,
    )
    assert len(out) == 3
    assert out[0] == out[1] == out[2]


def test_a_mistake_is_everybodys(cluster: UpCluster, lan: Lan) -> None:
    out = run_members(
        cluster,
        lan,
        "mistakes",
        """
        def failing(call, *args, **kwargs):
            try:
                call(*args, **kwargs)
                say("nothing")
            except Exception as error:
                say(type(error).__name__)
        failing(g.allreduce, np.ones(5 + rank))
        failing(g.allreduce, np.ones(500_000 + rank))
        failing(g.allreduce, np.ones(5), op="sum" if rank else "max")
        failing(g.allreduce if rank else g.allgather, np.ones(5))
        failing(g.allreduce, np.ones(5), op="nonsense" if rank == 1 else "sum")
        failing(g.broadcast, root=1)
        say(g.allreduce(np.ones(1))[0])
        """,
    )
    assert out == [["ValueError"] * 6 + ["3.0"]] * 3


def test_survivors_go_on(cluster: UpCluster, lan: Lan) -> None:
    """A member dies between two calls, with small and with large arrays."""
    out = run_members(
        cluster,
        lan,
        "survivors",
        """
        for count in (10, 1_000_000):
            g.allreduce(np.ones(count))
        if rank == 2:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        while len(g.alive) == 3:
            time.sleep(0.01)
        for count in (10, 1_000_000):
            got = g.allreduce(np.ones(count))
            say(got[0], got[-1], g.contributors)
        """,
    )
    assert out == [["2.0 2.0 (0, 1)"] * 2] * 2


def test_the_leader_dies(cluster: UpCluster, lan: Lan) -> None:
    out = run_members(
        cluster,
        lan,
        "leader",
        """
        for step in range(40):
            if rank == 0 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            got = g.allreduce(np.full(50_000 if step % 2 else 5, step, np.float64))
            assert got[0] == step * len(g.contributors)
        say(g.contributors, g.calls)
        """,
    )
    assert out == [["(1, 2) 40"]] * 2
