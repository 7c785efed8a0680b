"""Common parts of the benchmarks: sizes, rows of the table, the memcpy reference."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from benchmarks import tasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    import hoplite_mp

    Floats = NDArray[np.float32]

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
MIB = 2**20
BLOCK_BYTES = 64 * MIB
BLOCK = BLOCK_BYTES // 4
"""Elements of 64 MiB float32."""

STRIDE = 4099
"""Every 4099th element is looked at where reading all of them would be part of what is timed."""


@dataclasses.dataclass
class Row:
    """One line of the table; a row without a target is there to be read beside another."""

    title: str
    ours: float
    unit: str
    """`s` (shown as s, ms or µs), `1/s`, `% CPU` or `MB`."""
    reference: str = ""
    """What ours is compared with, measured in the same run."""
    reference_value: float | None = None
    """None with a reference: it cannot do that."""
    ratio: float | None = None
    """As the target means it; usually ours / reference."""
    wanted: float | None = None
    """The limit of what the target looks at: the ratio if there is one, else ours."""
    direction: Literal["<=", ">=", "<"] = "<="
    section: str = ""
    """Only to keep rows of one question together; filled in when they are recorded."""

    @property
    def looked_at(self) -> float:
        """The number that the target is about."""
        return self.ours if self.ratio is None else self.ratio

    @property
    def met(self) -> bool | None:
        """None without a target."""
        if self.wanted is None:
            return None
        if self.direction == ">=":
            return self.looked_at >= self.wanted
        if self.direction == "<":
            return self.looked_at < self.wanted
        return self.looked_at <= self.wanted

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {**dataclasses.asdict(self), "met": self.met}


def beside(title: str, ours: float, unit: str, reference: str, value: float | None) -> Row:
    """A row that only compares; value None: the other cannot do it."""
    return Row(title, ours, unit, reference, value, ratio=None if value is None else ours / value)


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def seconds(call: Callable[[], Any]) -> float:
    """How long a call took."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


class Memcpy:
    """memmove between two warm private buffers of 64 MiB."""

    def __init__(self) -> None:
        self._source = np.ones(BLOCK, np.float32)
        self._target = np.zeros(BLOCK, np.float32)
        self.seconds: list[float] = []
        self._copy()  # the first one may still touch pages
        self._copy()

    def sample(self) -> None:
        """One more copy on the record."""
        self.seconds.append(seconds(self._copy))

    @property
    def median(self) -> float:
        """Seconds for 64 MiB."""
        return median(self.seconds)

    @property
    def bytes_per_s(self) -> float:
        """How many bytes are copied a second."""
        return BLOCK_BYTES / self.median

    def _copy(self) -> None:
        ctypes.memmove(self._target.ctypes.data, self._source.ctypes.data, BLOCK_BYTES)


class Fresh:
    """An array of 64 MiB whose content is another one each time, made outside the timed part."""

    def __init__(self) -> None:
        self._base = (np.arange(BLOCK) % 1009).astype(np.float32)
        self.array = np.empty(BLOCK, np.float32)
        self._count = 0

    def next(self) -> Floats:
        """The same memory with new content: warm, as the benchmarks want it."""
        self._count += 1
        np.add(self._base, np.float32(self._count), out=self.array)
        return self.array

    def check_probe(self, probe: Floats) -> None:
        """What `tasks.probe` returned must come from the array as it is now."""
        assert np.array_equal(probe, self.array[::STRIDE])


def wake_all(cluster: hoplite_mp.Cluster) -> None:
    """Every worker has run something: it is started and has its imports."""
    pids: set[int] = set()
    deadline = time.monotonic() + 10
    while len(pids) < WORKERS and time.monotonic() < deadline:
        pids.update(cluster.map(tasks.report_pid, [0.01] * 2 * WORKERS, chunksize=1))


def run_script(name: str, *args: str) -> dict[str, Any]:
    """Run a script of benchmarks/scripts in a fresh interpreter; it prints one line of JSON."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "scripts" / name), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(
    benchmark: Any,
    *,
    rounds: int,
    prepare: Callable[[], tuple[Any, ...]],
    call: Callable[..., Any],
    check: Callable[[Any], None],
    warm_up: int = 0,
) -> list[float]:
    """Seconds of `call(*prepare())`, one for each round; only `call` is timed.

    `prepare` makes fresh data and gives the peers their turn, so that all are measured in turns;
    `check` gets the result and is called (also for warm-up rounds) before anything else happens.
    """
    unchecked: list[Any] = []

    def settle() -> None:
        while unchecked:
            check(unchecked.pop())

    def setup() -> tuple[tuple[Any, ...], dict[str, Any]]:
        settle()
        return prepare(), {}

    def timed(*args: Any) -> None:
        unchecked.append(call(*args))

    benchmark.pedantic(timed, setup=setup, rounds=rounds, warmup_rounds=warm_up)
    settle()
    return list(benchmark.stats.stats.data)


@contextlib.contextmanager
def cold_cluster() -> Iterator[hoplite_mp.Cluster]:
    """A fresh cluster: workers are up, but no large object has been made in it."""
    import hoplite_mp

    with hoplite_mp.Cluster(workers=WORKERS) as cluster:
        wake_all(cluster)
        yield cluster
