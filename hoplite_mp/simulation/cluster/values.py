"""Values whose every byte says where it comes from, and what collectives must make of them.

Why it exists: the promises are checked to the byte. A source of a collective is a power of two
times a pattern over the places of its elements, so a sum says who is in it, and a byte in a wrong
place is seen. Where the order of additions counts, sources are floats whose sum depends on it.
It must never know: how a value travels.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from hoplite_mp.ref import ObjectRef

__all__ = [
    "SOURCES_MAX",
    "Leaf",
    "WrongBytes",
    "add",
    "contributors_in",
    "make",
    "make_once_more",
    "make_refs",
    "rolled",
    "runs",
    "scaled",
    "sum_of",
]

PERIOD = 7  # of the pattern: no power of two, as blocks and stripes are
PATTERNS = 64  # that are kept, as many sources are of one length
SOURCES_MAX = 40  # bits of a source, of a salt and of the pattern fit into an int64
SALT_BITS = 10

Array = np.ndarray[Any, np.dtype[Any]]


class WrongBytes(AssertionError):
    """What was read is not what was written."""


@dataclass(frozen=True)
class Leaf:
    """One source: the `index`-th of a collective with that salt. `ordered`: floats, whose sum
    depends on the order of additions. `fortran`: a matrix of two rows, column by column."""

    salt: int  # below 1 << SALT_BITS, and odd
    index: int
    items: int
    ordered: bool = False
    fortran: bool = False

    def array(self) -> Array:
        """Its value."""
        flat = self._flat()
        return np.asfortranarray(flat.reshape(2, -1)) if self.fortran else flat

    def _flat(self) -> Array:
        if self.ordered:
            chance = np.random.default_rng([self.salt, self.index])
            return chance.standard_normal(self.items) * 10.0 ** chance.integers(-9, 9)
        return pattern(self.items) * (self.salt << self.index)


@functools.lru_cache(maxsize=PATTERNS)
def pattern(items: int) -> Array:
    """What a source is times its number."""
    made = np.arange(items, dtype=np.int64) % PERIOD + 1
    made.flags.writeable = False
    return made


# How often the task that makes a source has begun in this run: all processes of a run are in one.
runs: Counter[tuple[int, int]] = Counter()


def make(leaf: Leaf, seconds: float) -> Array:
    """The task that makes a source, in that time."""
    runs[leaf.salt, leaf.index] += 1
    time.sleep(seconds)
    return leaf.array()


def make_once_more(leaf: Leaf, seconds: float) -> Array:
    """The same for whoever may have it made more often: it is not counted."""
    time.sleep(seconds)
    return leaf.array()


def make_refs(leaves: list[Leaf]) -> list[ObjectRef[Array]]:
    """The task whose result is refs, which nobody else holds."""
    from hoplite_mp.cluster import current

    c = current()
    return [c.put(leaf.array()) for leaf in leaves]


def rolled(leaf: Leaf) -> Array:
    """The task whose value says how often it has run."""
    runs[leaf.salt, leaf.index] += 1
    return leaf.array() + runs[leaf.salt, leaf.index]


def scaled(value: Array, factor: int) -> Array:
    """The task that needs its argument."""
    return value * factor


def add(left: Array, right: Array) -> Array:
    """The task that adds two up."""
    return left + right


def sum_of(leaves: list[Leaf], seconds: list[float]) -> Array:
    """The task that has tasks make all of these, and adds them up."""
    from hoplite_mp.cluster import current

    c = current()
    parts = [c.submit(make_once_more, *one) for one in zip(leaves, seconds, strict=True)]
    return sum((part.result() for part in parts[1:]), start=parts[0].result())


def contributors_in(value: Array, salt: int) -> set[int]:
    """The indices of the sources in a sum. WrongBytes: it is no such sum in every place."""
    if not len(value):
        return set()
    first, rest = divmod(int(value[0]), salt)
    if rest or not np.array_equal(value, pattern(len(value)) * (first * salt)):
        raise WrongBytes(f"a sum of sources with salt {salt} is torn: {value[:PERIOD]}")
    return {bit for bit in range(first.bit_length()) if first >> bit & 1}
