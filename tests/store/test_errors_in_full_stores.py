"""A store filled to the brim: what a task raises still arrives as itself."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import Config, _serialize
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 30.0
SMALL = Config(
    small_object_bytes_max=4096, put_wait_s=0.2, spill_bytes_max=0, span_bytes=65536, retries=0
)


class Own(Exception):
    def __init__(self, number: int, *, note: str) -> None:
        super().__init__(number, note)
        self.number, self.note = number, note

    def __reduce__(self) -> Any:
        return _own, (self.number, self.note)


def _own(number: int, note: str) -> Own:
    return Own(number, note=note)


KINDS = [ValueError, KeyError, ZeroDivisionError, OSError, LookupError, MemoryError]


def fails(number: int, chars: int = 0) -> None:
    if number % 7 == 6:
        raise Own(number, note="x" * chars)
    raise KINDS[number % 7](f"reason {number}" + "x" * chars)


def fails_with_much(nbytes: int) -> None:
    raise ValueError("the reason", np.zeros(nbytes, np.uint8))


def fill(cluster: hoplite_mp.Cluster) -> list[Any]:
    """Until nothing fits any more, neither large nor small."""
    kept = []
    for nbytes in (1 << 20, 1 << 16, 8192, 4000, 300):
        with contextlib.suppress(hoplite_mp.StoreFullError):
            while True:
                ref = cluster.put(bytes(nbytes))
                kept.append((ref, cluster.get(ref)))  # pinned
    return kept


def fill_here() -> int:
    """The same in a worker, whose spans are full, too; it keeps what it has put."""
    hoplite_mp.errors.kept = fill(hoplite_mp.current())  # type: ignore[attr-defined]
    return len(hoplite_mp.errors.kept)  # type: ignore[attr-defined]


def fill_all(folder: Path, workers: int) -> None:
    """In each of so many workers. From then on they would wait for room longer than anybody waits
    for their errors."""
    (folder / str(os.getpid())).touch()
    eventually(lambda: len(list(folder.iterdir())) == workers, "a task in each worker")
    fill_here()
    memory = hoplite_mp.current()._runtime.memory
    memory.config = dataclasses.replace(memory.config, put_wait_s=10 * PATIENCE_S)


@pytest.mark.parametrize("workers", [1, 2])
def test_many_different_exceptions_arrive_whole(tmp_path: Path, workers: int) -> None:
    with hoplite_mp.Cluster(workers, memory="16MiB", config=SMALL) as cluster:
        kept = fill(cluster)
        for filled in [cluster.submit(fill_all, tmp_path, workers) for _ in range(workers)]:
            filled.result(PATIENCE_S)
        futures = [cluster.submit(fails, number, 500) for number in range(100)]
        for number, future in enumerate(futures):
            error = future.exception(PATIENCE_S)
            if number % 7 == 6:
                assert type(error) is Own
                assert (error.number, error.note) == (number, "x" * 500)
            else:
                assert type(error) is KINDS[number % 7]
                assert error.args == (f"reason {number}" + "x" * 500,)
            assert "in fails" in str(error.__cause__), error.__cause__
        del futures, future, error
        assert len(kept) > 10


def test_when_the_reserve_is_used_up_type_and_text_stay() -> None:
    with hoplite_mp.Cluster(1, memory="16MiB", config=SMALL) as cluster:
        kept = fill(cluster)
        cluster.submit(fill_here).result(PATIENCE_S)
        futures = [cluster.submit(fails, number) for number in range(600)]
        for number, future in enumerate(futures):
            error = future.exception(PATIENCE_S)
            if number % 7 == 6:
                assert type(error) is Own
            else:
                assert type(error) is KINDS[number % 7]
                assert error.args[0] == f"reason {number}"
        del futures, future, error
        assert type(cluster.submit(fails, 0, 500).exception(PATIENCE_S)) is ValueError
        assert kept


def test_an_exception_that_carries_much() -> None:
    with hoplite_mp.Cluster(1, memory="16MiB", config=SMALL) as cluster:
        kept = fill(cluster)
        error = cluster.submit(fails_with_much, 1 << 20).exception(PATIENCE_S)
        assert type(error) is ValueError
        assert error.args == ("the reason", "<ndarray, too large to be sent>")
        assert "in fails_with_much" in str(error.__cause__)
        assert kept


def test_a_death_in_a_full_store_is_told_in_full() -> None:
    with hoplite_mp.Cluster(1, memory="16MiB", config=SMALL) as cluster:
        kept = fill(cluster)
        with pytest.raises(hoplite_mp.WorkerLostError, match="exit code 3 while running _exit"):
            cluster.submit(os._exit, 3).result(PATIENCE_S)
        assert kept


@pytest.mark.parametrize("nbytes_max", [192, 1000, 4096, 65536])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("short"),
        KeyError("much" * 100_000),
        OSError(2, "y" * 100_000),
        Own(3, note="z" * 100_000),
        UnicodeDecodeError("utf-8", b"\xff" * 100_000, 0, 1, "why"),
        hoplite_mp.StoreFullError("full" * 1000),
    ],
    ids=lambda error: type(error).__name__ if isinstance(error, Exception) else None,
)
def test_cut_to_a_size(error: BaseException, nbytes_max: int) -> None:
    encoded = _serialize.encode_short_error(error, "the traceback " * 10_000, nbytes_max)
    assert encoded.nbytes <= nbytes_max
    read = _serialize.decode_error(memoryview(encoded.tobytes()), lambda object_id: None)  # type: ignore[arg-type,return-value]
    if nbytes_max >= 1000:
        assert type(read) is type(error)
        assert "the traceback" in str(read.__cause__)
