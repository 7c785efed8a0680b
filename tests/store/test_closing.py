"""Leaving `with` while results are unread, and stores too small for spans of the usual size."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, Config, ConfigError, StoreFullError
from hoplite_mp._client.submitter import last_resort
from tests.support.values import MIB

if TYPE_CHECKING:
    from pathlib import Path


LONG_S = 300.0  # what nobody should wait for: longer than a test may take


def small(number: int) -> bytes:
    return bytes([number % 256]) * 5000


def large(number: int) -> Any:
    return np.full(4 * MIB // 8, float(number))


def outcomes(futures: list[Any], wanted: Any) -> dict[str, int]:
    """How many results are what they should be, and how many failed how."""
    found: dict[str, int] = {}
    for number, future in enumerate(futures):
        try:
            good = bool(np.all(future.result() == wanted(number)))
        except Exception as error:
            kind = str(error) if isinstance(error, ClosedError) else type(error).__name__
            found[kind] = found.get(kind, 0) + 1
        else:
            assert good, number
            found["read"] = found.get("read", 0) + 1
    return found


def test_a_small_full_store_closes_soon_and_its_results_can_be_read_after() -> None:
    config = Config(put_wait_s=LONG_S, shutdown_timeout_s=LONG_S)
    with hoplite_mp.Cluster(2, memory="2MiB", config=config) as c:
        futures = [c.submit(small, number) for number in range(400)]
        c.wait(futures)
        begun = time.monotonic()
    assert time.monotonic() - begun < LONG_S / 10
    assert outcomes(futures, small) == {"read": 400}


def test_results_on_disk_are_kept_up_to_the_size_of_the_store(tmp_path: Path) -> None:
    config = Config(populate_ahead_bytes=0)
    with hoplite_mp.Cluster(2, memory="32MiB", spill_dir=tmp_path, config=config) as c:
        futures = [c.submit(large, number) for number in range(20)]
        c.wait(futures)
    found = outcomes(futures, large)
    assert 12 <= found.pop("read") < 20, "7 that were in the store, 7 from the disk"
    (words,) = found
    assert words.startswith(
        "its result had been moved to disk and was not read before the cluster closed"
    )
    assert "32 MiB" in words
    value: Any = None  # which results are kept depends on the order in which tasks have ended
    for future in futures:
        with contextlib.suppress(hoplite_mp.ClosedError):
            value = future.result()
    assert not value.flags.writeable
    assert value.ctypes.data % 64 == 0


def test_without_time_results_on_disk_are_not_kept(tmp_path: Path) -> None:
    config = Config(populate_ahead_bytes=0, shutdown_timeout_s=0)
    with hoplite_mp.Cluster(1, memory="32MiB", spill_dir=tmp_path, config=config) as c:
        futures = [c.submit(large, number) for number in range(10)]
        c.wait(futures)
    with pytest.raises(ClosedError, match=r"moved to disk .* \(there was no time left\)"):
        futures[0].result()
    with pytest.raises(ClosedError, match="moved to disk"):
        futures[0].exception()

    async def wrapped() -> Any:
        async with asyncio.timeout(LONG_S / 10):
            return await asyncio.wrap_future(futures[0])

    with pytest.raises(ClosedError, match="moved to disk"):
        asyncio.run(wrapped())

    def by_snapshot(done: Any) -> None:  # as asyncio reads a Future since Python 3.15
        found.append(done._get_snapshot())

    found: list[Any] = []
    by_snapshot.__module__ = "asyncio.futures"
    futures[0].add_done_callback(by_snapshot)
    ((*state, error),) = found
    assert state == [True, False, None]
    assert type(error) is ClosedError
    assert (futures[9].result() == 9).all()


def filled(number: int) -> bytes:
    return bytes([number]) * 60_000


def test_small_spans_in_a_small_store() -> None:
    with hoplite_mp.Cluster(2, memory="2MiB") as c:
        futures = [c.submit(filled, number) for number in range(40)]
        assert all(c.get(future) == filled(number) for number, future in enumerate(futures))
        refs = [c.put(filled(number)) for number in range(40)]
        assert all(c.get(ref) == filled(number) for number, ref in enumerate(refs))


def test_a_store_with_no_room_for_its_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"12 workers: each of 14 .* 131072 bytes .* 1835008"):
        hoplite_mp.Cluster(12, memory="1MiB")
    config = Config(small_object_bytes_max=4096)
    with hoplite_mp.Cluster(4, memory="1MiB", config=config) as c:
        assert c.submit(len, b"12").result() == 2


def test_an_error_without_room_keeps_its_type() -> None:
    from hoplite_mp import _serialize, _shm

    for kind in (StoreFullError, hoplite_mp.HopliteTimeoutError, KeyError):
        encoded = last_resort(kind("much" * 100))
        assert encoded.nbytes <= _shm.INLINE_BYTES_MAX
        error = _serialize.decode_error(memoryview(encoded.tobytes()), lambda object_id: None)  # type: ignore[arg-type,return-value]
        assert type(error) is (kind if kind is not KeyError else hoplite_mp.HopliteError)
