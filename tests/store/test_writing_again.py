"""Large values written where others were before: first through the file, then a mapping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.support.values import MIB

if TYPE_CHECKING:
    from hoplite_mp import Cluster

NBYTES = 8 * MIB
ROUNDS_MAX = 20


def test_each_way_of_writing_leaves_the_bytes(cluster: Cluster) -> None:
    memory = cluster._runtime.memory
    mapped_before = len(memory.mapped.units)
    rounds = []
    for number in range(ROUNDS_MAX):  # the same place again and again, as soon as it is free
        array = np.arange(number, number + NBYTES // 8)
        ref = cluster.put(array)
        assert np.array_equal(cluster.get(ref), array)
        assert cluster.submit(np.array_equal, ref, array).result()
        del ref
        rounds.append(len(memory.mapped.units) - mapped_before)
        if number > 2 and rounds[-3] > 0:  # it was written through the mapping twice at least
            break
    assert rounds[0] == 0
    assert rounds[-1] >= NBYTES // MIB
