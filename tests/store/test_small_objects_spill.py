"""Small objects that are in use, in spans of one process, make room for what others need."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import Config, StoreFullError

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
SMALL = 50_000  # bytes: below small_object_bytes_max
MANY = 200  # of these are more than the store


def filled(number: int) -> bytes:
    return bytes([number % 256]) * SMALL


def large() -> np.ndarray:  # type: ignore[type-arg]
    return np.ones(6 * MIB, np.uint8)


def opened(tmp_path: Path, put_wait_s: float = 60) -> hoplite_mp.Cluster:
    config = Config(put_wait_s=put_wait_s)
    return hoplite_mp.Cluster(1, memory="8MiB", spill_dir=tmp_path, config=config)


def test_results_of_a_worker_make_room_for_what_the_driver_puts(tmp_path: Path) -> None:
    with opened(tmp_path) as c:
        futures = [c.submit(filled, number) for number in range(MANY)]
        c.wait(futures)
        ref = c.put(large())
        assert int(c.get(ref).sum(dtype=np.int64)) == 6 * MIB
        del ref
        assert all(c.get(future) == filled(number) for number, future in enumerate(futures))


def test_what_the_driver_has_put_makes_room_for_a_result(tmp_path: Path) -> None:
    with opened(tmp_path) as c:
        refs = [c.put(filled(number)) for number in range(MANY)]
        future = c.submit(large)
        assert int(future.result(60).sum(dtype=np.int64)) == 6 * MIB
        del future
        assert all(c.get(ref) == filled(number) for number, ref in enumerate(refs))


def test_what_is_read_at_present_stays(tmp_path: Path) -> None:
    """One object in use keeps its span; when all spans are kept that way there is no room."""
    with opened(tmp_path, put_wait_s=0.3) as c:
        arrays = [np.full(SMALL, number % 256, np.uint8) for number in range(120)]
        refs = [c.put(array) for array in arrays]
        views = [c.get(ref) for ref in refs]
        with pytest.raises(StoreFullError):
            c.put(large())
        assert all(np.array_equal(*pair) for pair in zip(views, arrays, strict=True))
        assert c.stats()["bytes_spilled"] == 0
        del views
        memory = c._runtime.memory  # from here on a put that waits finds space
        memory.config = dataclasses.replace(memory.config, put_wait_s=60.0)
        assert int(c.get(c.put(large())).sum(dtype=np.int64)) == 6 * MIB
        assert all(int(c.get(ref)[0]) == number for number, ref in enumerate(refs))
