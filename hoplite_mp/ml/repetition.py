"""Gradient coding by fractional repetition: sums that do not wait for slow workers."""

from __future__ import annotations

import dataclasses

__all__ = ["Repetition"]


@dataclasses.dataclass(frozen=True)
class Repetition:
    """Assigns shards to workers so that any n - s workers hold all shards (Tandon et al., 2017).

    The workers form groups of s + 1, and all workers in a group compute the same s + 1 of the n
    shards. So the sum over all shards needs only one result from each group, whichever s workers
    are slow or fail: ``c.reduce(refs, one_of=code.groups)``. Each worker does s + 1 times the
    work.

    This is the fractional repetition code of Tandon, Lei, Dimakis and Karampatziakis, *Gradient
    Coding: Avoiding Stragglers in Distributed Learning*, ICML 2017, section 4. Their cyclic code
    allows any s, but its decoding coefficients are too large for float32.

    Parameters
    ----------
    n : int
        The number of workers, and of shards.
    s : int
        The number of workers that may be slow or fail, at least 0; s + 1 must divide n.

    Raises
    ------
    ValueError
        n is below 1, s is below 0, or s + 1 does not divide n.

    Examples
    --------
    >>> from hoplite_mp import ml
    >>> code = ml.Repetition(4, 1)
    >>> code.groups
    ((0, 1), (2, 3))
    >>> code.shards(2)
    (2, 3)
    >>> refs = [c.put(float(sum(code.shards(rank)))) for rank in range(4)]
    >>> float(c.get(c.reduce(refs, one_of=code.groups)))
    6.0
    """

    n: int
    s: int

    def __post_init__(self) -> None:
        for name, least in (("n", 1), ("s", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"Repetition: {name}={value!r} must be a whole number ≥ {least}")
        if self.n % (self.s + 1):
            raise ValueError(
                f"Repetition: s + 1 = {self.s + 1} must divide n = {self.n}, because workers form "
                "groups of s + 1"
            )

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each group, for the argument `one_of` of `reduce` and `allreduce`."""
        size = self.s + 1
        return tuple(tuple(range(at, at + size)) for at in range(0, self.n, size))

    def shards(self, rank: int) -> tuple[int, ...]:
        """The shards that the worker `rank` computes, from 0 to n - 1. Raises ValueError if there
        is no such rank."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.n:
            raise ValueError(f"Repetition: rank={rank!r} must be from 0 to {self.n - 1}")
        return self.groups[rank // (self.s + 1)]
