"""An array that a Future has given is pinned by who holds it, not by the Future."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hoplite_mp import Cluster, Future

MIB = 1 << 20


def filled(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.full(8 * MIB, number, np.uint8)


def test_a_list_of_futures_that_were_read_does_not_fill_the_store() -> None:
    with Cluster(workers=2, memory="64MiB") as c:
        futures = [c.submit(filled, number) for number in range(20)]
        assert sum(int(future.result()[0]) for future in futures) == sum(range(20))
        assert [int(future.result()[-1]) for future in futures] == list(range(20))


def test_it_is_one_array_while_somebody_has_it() -> None:
    with Cluster(workers=1) as c:
        future = c.submit(filled, 3)
        held = future.result()
        assert future.result() is held
        assert future.exception() is None
        del held
        gc.collect()
        assert int(future.result()[5]) == 3


@pytest.mark.parametrize("held", [False, True])
def test_it_can_be_read_again_after_the_end(held: bool) -> None:
    with Cluster(workers=1) as c:
        future: Future[np.ndarray[tuple[int], np.dtype[np.uint8]]] = c.submit(filled, 7)
        kept = [future.result()] if held else []
        assert int(future.result()[0]) == 7
    assert int(future.result()[0]) == 7
    kept.clear()
    gc.collect()
    assert int(future.result()[-1]) == 7


def test_writable_ones_are_the_futures_own() -> None:
    with Cluster(workers=1) as c:
        future = c.options(copy=True).submit(filled, 1)
        future.result()[0] = 9
        gc.collect()
        assert int(future.result()[0]) == 9
