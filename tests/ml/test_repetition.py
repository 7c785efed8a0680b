"""Fractional repetition codes: who computes what, and exact sums without slow or dead workers."""

from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import ml
from tests.support.waiting import Gate

if TYPE_CHECKING:
    from pathlib import Path

    from hoplite_mp import Cluster

CODES = st.builds(lambda groups, s: ml.Repetition(groups * (s + 1), s), st.integers(1, 5),
                  st.integers(0, 3))  # fmt: skip
SHARDS = [np.random.default_rng(k).standard_normal(1000).astype(np.float32) for k in range(4)]
CODE = ml.Repetition(4, 1)


@given(CODES)
def test_shards_are_computed_by_all_ranks_of_one_group(code: ml.Repetition) -> None:
    assert sorted(itertools.chain(*code.groups)) == list(range(code.n))
    for group in code.groups:
        assert len(group) == code.s + 1
        assert len({code.shards(rank) for rank in group}) == 1
    counted = list(itertools.chain(*(code.shards(rank) for rank in range(code.n))))
    assert sorted(counted) == sorted([*range(code.n)] * (code.s + 1))


@given(CODES, st.data())
def test_any_ranks_but_s_have_all_shards(code: ml.Repetition, data: st.DataObject) -> None:
    ranks = data.draw(st.permutations(range(code.n)))[: code.n - code.s]
    assert all(set(group).intersection(ranks) for group in code.groups)
    assert {*itertools.chain(*map(code.shards, ranks))} == set(range(code.n))


@pytest.mark.parametrize(
    ("n", "s", "text"),
    [(0, 0, "n=0"), (4, -1, "s=-1"), (4, 2, "3 must divide n = 4"), (4.0, 1, "n=4.0"),
     (2, True, "s=True"), (2, 2, "must divide")],
)  # fmt: skip
def test_wrong_numbers_are_errors(n: Any, s: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ml.Repetition(n, s)


@pytest.mark.parametrize("rank", [-1, 4, 1.0, True])
def test_wrong_rank_is_an_error(rank: Any) -> None:
    with pytest.raises(ValueError, match="rank="):
        CODE.shards(rank)


def gradient(rank: int, gate: Gate | None = None, dies: bool = False) -> Any:
    """The sum of the rank's shards; late, or never."""
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    if gate is not None:
        gate.wait()
    return sum(SHARDS[shard] for shard in CODE.shards(rank))


def test_sum_without_a_slow_rank_has_the_undisturbed_bits(cluster: Cluster, tmp_path: Path) -> None:
    expected = gradient(0) + gradient(2)
    with cluster.executor(4) as pool:
        for slow in range(4):
            gate = Gate(tmp_path, str(slow))
            tasks = [pool.submit(gradient, r, gate if r == slow else None) for r in range(4)]
            total = cluster.reduce(tasks, one_of=CODE.groups, reproducible=True)
            assert cluster.get(total, timeout=30).tobytes() == expected.tobytes()
            assert slow not in (total.contributors or ())
            gate.open()


def test_sum_of_killed_ranks_has_the_undisturbed_bits() -> None:
    expected = gradient(0) + gradient(2)
    with hoplite_mp.Cluster(workers=2, memory="64MiB") as alone:
        once = alone.options(retries=0)
        for dead in range(4):
            tasks = [once.submit(gradient, rank, None, rank == dead) for rank in range(4)]
            total = alone.allreduce(tasks, one_of=CODE.groups, reproducible=True)
            assert alone.get(total, timeout=30).tobytes() == expected.tobytes()
            assert dead not in (total.contributors or ())
