"""Robust reductions of Groups whose members are on several emulated hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.lan_programs import run_members

if TYPE_CHECKING:
    from tests.lan import Lan
    from tests.support.clusters import UpCluster

WORKERS = 0  # of each host's

OPERATORS = """
    from hoplite_mp import ml
    from hoplite_mp._common.slice_operators import fold_whole
    for length in (10, 300_000):
        rows = [np.random.default_rng(r).standard_normal(length) + 1 for r in range(size)]
        rows[1] = rows[1] * -5
        for op in (ml.Median(), ml.TrimmedMean(1), ml.GeometricMedian(3)):
            got = g.allreduce(rows[rank], op=op)
            expected, accepted = fold_whole(op, rows)
            assert np.allclose(got, expected, rtol=1e-6), op
            assert g.contributors == tuple(accepted)
        bad = rows[rank] * (np.nan if rank == 2 else 1)
        got = g.allreduce(bad, op="mean", finite=True)
        kept = [r for r in range(size) if r != 2]
        assert g.contributors == tuple(kept)
        assert np.allclose(got, np.mean([rows[r] for r in kept], axis=0))
    say("all", g.allreduce(1))
"""


def test_operators_of_members_on_three_hosts_equal_one_reduction(
    cluster: UpCluster, lan: Lan
) -> None:
    assert run_members(cluster, lan, "robust", OPERATORS) == [["all 3"]] * 3
