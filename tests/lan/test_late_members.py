"""A Group's large allreduce begins before its last member has called, and stays right."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.lan_programs import run_members

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

COMMON = """
    def part(r, turn, shape=(1 << 21,)):
        made = np.random.default_rng([r, turn]).integers(-999, 999, shape)
        return made.astype(np.float32)
    def received():
        return sum(one["bytes_received"] for one in c.stats()["nodes"].values())
    def wait_for_bytes(before, nbytes):
        deadline = time.monotonic() + 20
        while received() - before < nbytes and time.monotonic() < deadline:
            time.sleep(0.02)
        return received() - before >= nbytes
    before = received()  # nobody goes on without this rank
    g.barrier()
"""


WORKERS = 0  # of each host's


def test_the_others_begin(cluster: UpCluster, lan: Lan) -> None:
    """Each rank is late once, the leading one too; half a part of each of the others has been
    received before it calls."""
    program = (
        COMMON
        + """
    came = []
    for turn in range(size):
        mine = part(rank, turn)
        if rank == turn:
            came.append(wait_for_bytes(before, mine.nbytes))
        got = g.allreduce(mine)
        assert np.array_equal(got, sum(part(r, turn) for r in range(size)))
        assert g.contributors == tuple(range(size))
        before = received()
        g.barrier()
    say(came)
    """
    )
    assert run_members(cluster, lan, "late", program) == [["[True]"]] * 3


@pytest.mark.soak
def test_it_gives_something_else(cluster: UpCluster, lan: Lan) -> None:
    """Another shape, another op, another call: everybody's mistake, and the next call is good."""
    program = (
        COMMON
        + """
    for turn, other in enumerate((
        lambda: g.allreduce(part(rank, 9, (1 << 20, 3))),
        lambda: g.allreduce(part(rank, 9), op="max"),
        lambda: g.allreduce(np.ones(3, np.float32)),
        lambda: g.barrier(),
    )):
        try:
            if rank == 1:
                assert wait_for_bytes(before, 8 << 20)
                other()
            else:
                g.allreduce(part(rank, turn))
        except ValueError as error:
            say("mistake")
        got = g.allreduce(part(rank, turn))
        assert np.array_equal(got, sum(part(r, turn) for r in range(size)))
        before = received()
        g.barrier()
    """
    )
    assert run_members(cluster, lan, "other", program) == [["mistake"] * 4] * 3


def test_it_dies_instead(cluster: UpCluster, lan: Lan) -> None:
    program = (
        COMMON
        + """
    if rank == 2:
        assert wait_for_bytes(before, 8 << 20)
        os.kill(os.getpid(), signal.SIGKILL)
    got = g.allreduce(part(rank, 0))
    assert np.array_equal(got, sum(part(r, 0) for r in g.contributors))
    say(g.contributors)
    """
    )
    assert run_members(cluster, lan, "dies", program) == [["(0, 1)"]] * 2


@pytest.mark.soak
def test_whoever_is_late_by_whatever(cluster: UpCluster, lan: Lan) -> None:
    """About as late as others wait: plans, parts and calls cross."""
    program = (
        COMMON
        + """
    r = np.random.default_rng(rank)
    for turn in range(25):
        mine = part(rank, turn, (5 << 18,))
        time.sleep(r.random() * 0.02)
        got = g.allreduce(mine)
        assert np.array_equal(got, sum(part(r, turn, (5 << 18,)) for r in range(size))), turn
    say("equal")
    """
    )
    assert run_members(cluster, lan, "jitter", program) == [["equal"]] * 3
