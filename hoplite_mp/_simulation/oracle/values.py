"""Values whose bytes identify their origin, and the expected results of collectives.

Every byte is checked. A source of a collective is a power of two times a pattern that depends on
the positions of elements, so a sum shows which sources it contains, and misplaced bytes are
detected. If the order of additions matters, sources are floats whose sum depends on the order.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp.ml.robust import GeometricMedian, Median, Score, TrimmedMean

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._common.ref import ObjectRef

__all__ = [
    "SOURCES_MAX",
    "FaultyLeaf",
    "Leaf",
    "WrongBytes",
    "add",
    "contributors_in",
    "delayed",
    "make",
    "make_once_more",
    "make_refs",
    "make_with_refs",
    "pattern",
    "reduced",
    "rolled",
    "runs",
    "scaled",
    "sum_of",
]

PERIOD = 7  # of the pattern; not a power of two, unlike sizes of blocks and stripes
PATTERNS = 64  # number of cached patterns
SOURCES_MAX = 40  # bits of index, salt and pattern together fit into an int64
SALT_BITS = 10
RETRY_DELAY = 0.05, 3.0, 0.4

Array = np.ndarray[Any, np.dtype[Any]]


class WrongBytes(AssertionError):
    """The data that was read differs from the data that was written."""


@dataclass(frozen=True)
class Leaf:
    """One source: number `index` of a collective with the salt. `ordered`: floats, whose sum
    depends on the order of additions. `fortran`: a matrix of two rows in column-major order."""

    salt: int  # below 1 << SALT_BITS, and odd
    index: int
    items: int
    ordered: bool = False
    fortran: bool = False

    def array(self) -> Array:
        """Returns the value."""
        flat = self._flat()
        return np.asfortranarray(flat.reshape(2, -1)) if self.fortran else flat

    def _flat(self) -> Array:
        if self.ordered:
            rng = np.random.default_rng([self.salt, self.index])
            return rng.standard_normal(self.items) * 10.0 ** rng.integers(-9, 9)
        return pattern(self.items) * (self.salt << self.index)


class FaultyLeaf(Leaf):
    """A source of NaN."""

    def _flat(self) -> Array:
        return np.full(self.items, np.nan)


@functools.lru_cache(maxsize=PATTERNS)
def pattern(items: int) -> Array:
    """Returns the pattern of which a source is a multiple."""
    made = np.arange(items, dtype=np.int64) % PERIOD + 1
    made.flags.writeable = False
    return made


# Number of starts of each task that makes a source. A global variable suffices, because all
# simulated processes are threads of this process.
runs: Counter[tuple[int, int]] = Counter()


def make(leaf: Leaf, seconds: float) -> Array:
    """A task that makes a source after the given time."""
    runs[leaf.salt, leaf.index] += 1
    time.sleep(seconds)
    return leaf.array()


def make_once_more(leaf: Leaf, seconds: float) -> Array:
    """Like `make`, but not counted, for tasks that may run more than TRIES times."""
    time.sleep(seconds)
    return leaf.array()


def make_refs(leaves: list[Leaf]) -> list[ObjectRef[Array]]:
    """A task that returns refs which no other process holds."""
    from hoplite_mp._api.cluster import current

    c = current()
    return [c.put(leaf.array()) for leaf in leaves]


def make_with_refs(leaves: list[Leaf], items: int) -> tuple[Array, list[ObjectRef[Array]]]:
    """A task that returns an array of the given length, and such a list."""
    return pattern(items), make_refs(leaves)


def rolled(leaf: Leaf, seconds: float) -> Array:
    """A task whose result shows how often it has run."""
    runs[leaf.salt, leaf.index] += 1
    time.sleep(seconds)
    return leaf.array() + runs[leaf.salt, leaf.index]


def delayed(c: Cluster, salt: int) -> Cluster:
    """Returns the cluster for tasks of the salt. For every second salt, retries are delayed."""
    return c.options(retry_delay=RETRY_DELAY) if salt % 4 == 1 else c


def scaled(value: Array, factor: int) -> Array:
    """A task that multiplies its argument."""
    return value * factor


def add(left: Array, right: Array) -> Array:
    """A task that adds two values."""
    return left + right


def sum_of(leaves: list[Leaf], seconds: list[float]) -> Array:
    """A task that submits a task for each leaf, and adds their results."""
    from hoplite_mp._api.cluster import current

    c = delayed(current(), leaves[0].salt)
    parts = [c.submit(make_once_more, *one) for one in zip(leaves, seconds, strict=True)]
    return sum((part.result() for part in parts[1:]), start=parts[0].result())


def contributors_in(value: Array, salt: int) -> set[int]:
    """Returns the indices of the sources in a sum. WrongBytes: the elements have different
    sources."""
    if not len(value):
        return set()
    first, rest = divmod(int(value[0]), salt)
    if rest or not np.array_equal(value, pattern(len(value)) * (first * salt)):
        raise WrongBytes(f"a sum of sources with salt {salt} is torn: {value[:PERIOD]}")
    return {bit for bit in range(first.bit_length()) if first >> bit & 1}


def reduced(op: Any, rows: list[Array]) -> Array:
    """Reduces the contributors' arrays with numpy. `op`: a robust operator, "mean", "max" or
    "sum"."""
    count, dtype = len(rows), rows[0].dtype
    if op == "max":
        return functools.reduce(np.maximum, rows)
    wide = np.stack(rows).astype(np.float64)
    if isinstance(op, GeometricMedian):
        return _geometric_median(wide, op.iterations).astype(dtype)
    if isinstance(op, Score):
        norms = np.linalg.norm(wide, axis=1, keepdims=True)
        wide *= np.linalg.norm(op.v) / norms
    elif isinstance(op, Median):
        wide = np.sort(wide, axis=0)[(count - 1) // 2 : count // 2 + 1]
    elif isinstance(op, TrimmedMean):
        wide = np.sort(wide, axis=0)[op.f : count - op.f]
    total: Array = functools.reduce(np.add, wide)
    if op in ("mean", "sum"):
        total = total.astype(dtype)
        return total / dtype.type(count) if op == "mean" else total
    mean: Array = (total / len(wide)).astype(dtype)
    return mean


def _geometric_median(rows: Array, iterations: int) -> Array:
    """Weiszfeld's iteration, with the step of Vardi and Zhang at one of the rows."""
    rows = rows[np.isfinite(rows).all(axis=1)]
    point = np.median(rows, axis=0)
    for _ in range(iterations):
        distances = np.linalg.norm(rows - point, axis=1)
        apart = distances > distances.max() * 1e-9
        if not apart.any():
            break
        weights = np.where(apart, 1 / np.where(apart, distances, 1), 0.0)
        moved = weights @ rows / weights.sum()
        here = len(rows) - int(apart.sum())
        norm = float(np.linalg.norm((moved - point) * weights.sum()))
        back = min(1.0, here / norm) if norm else float(here > 0)
        point = (1 - back) * moved + back * point
    return point
