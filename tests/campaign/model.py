"""What every ref of a campaign must give, and which failures are explained by what has happened.

Under faults a call may fail, but only for a reason. A Known has the exact value, or the error of
its task; what else may come instead depends on what was done to it (deleted, cancelled), on what it
was made from, on the faults since then, and on the world (a small store).
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp

if TYPE_CHECKING:
    from tests.campaign.tally import Mark, Tally

__all__ = ["Known", "Unexplained", "World", "alike"]

MANY = 100
"""Retries of a task that no number of faults in one program uses up."""


class Unexplained(AssertionError):
    """A value that is wrong, or an error for which there is no reason."""


@dataclasses.dataclass
class World:
    """What holds for a whole program."""

    tally: Tally
    small: bool = False  # the store may be full
    lossy: bool = False  # hosts die
    exposed: bool = False  # among them the one on which this driver is
    interrupted: bool = False  # Ctrl-C happens

    def gone(self, error: BaseException) -> bool:
        """Has the node of this driver been lost, perhaps, and is that what the error says?"""
        kinds = (hoplite_mp.NodeLostError, hoplite_mp.ClosedError, hoplite_mp.ObjectLostError)
        return self.exposed and self.tally.begun("host") > 0 and isinstance(error, kinds)


@dataclasses.dataclass
class Known:
    """One ref or Future, and what it must be."""

    world: World
    ref: Any
    value: Any  # what get() gives, if error is None
    above: tuple[Known, ...] = ()  # what it was made from
    error: type[BaseException] | None = None  # what its task raises
    retries: int = MANY
    fragile: bool = False  # goes with the process, or the host, that has made it
    bound: bool = False  # to a node
    deleted: bool = False
    cancelled: bool = False
    born: Mark = ()

    def __post_init__(self) -> None:
        self.born = self.born or self.world.tally.mark()

    @property
    def steady(self) -> bool:
        """It has a value, and nobody has done anything to it, so others may be made from it."""
        mine = self.error is None and not (self.deleted or self.cancelled or self.fragile)
        return mine and all(one.steady or one.error is None for one in self.above)

    def died(self, kind: str) -> int:
        return self.world.tally.since(self.born, kind)

    def explained(self, error: BaseException) -> bool:
        """May it give this error?"""
        if self.error is not None and type(error) is self.error:
            return True
        if self.cancelled and isinstance(error, CancelledError):
            return True
        hosts = self.died("host") if self.world.lossy else 0
        if isinstance(error, hoplite_mp.ObjectLostError):
            if self.deleted or (self.fragile and (hosts or self.died("worker"))):
                return True
            if hosts > self.retries:
                return True
        elif isinstance(error, hoplite_mp.NodeLostError):
            if hosts and (self.bound or hosts > self.retries):
                return True
        elif isinstance(error, hoplite_mp.WorkerLostError):
            if self.died("worker") + hosts > self.retries:
                return True
        elif self.world.small and self.error is None and no_room(error):
            return True
        if isinstance(error, hoplite_mp.ReduceError) and error.__cause__ is not None:
            return self.explained(error.__cause__)
        return self.world.gone(error) or any(one.explained(error) for one in self.above)

    def check(self, found: Any) -> None:
        """What a call gave."""
        if self.error is not None:
            raise Unexplained(f"{found!r} in place of {self.error.__name__}")
        if not alike(found, self.value):
            raise Unexplained(f"{shown(found)} in place of {shown(self.value)}")

    def judge(self, error: BaseException) -> None:
        """What a call raised."""
        if isinstance(error, Unexplained) or not self.explained(error):
            raise error


def no_room(error: BaseException | None) -> bool:
    """Is it of a store that is full, perhaps one error below another?"""
    while error is not None:
        if isinstance(error, hoplite_mp.StoreFullError):
            return True
        error = error.__cause__
    return False


def alike(found: Any, wanted: Any) -> bool:
    """Equal to the bit, of one shape and dtype, also inside containers."""
    if isinstance(wanted, np.ndarray):
        same = isinstance(found, np.ndarray) and found.dtype == wanted.dtype
        return same and np.array_equal(found, wanted)
    if type(found) is not type(wanted):
        return False
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(alike(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(alike, found, wanted))
    return bool(found == wanted)


def shown(value: Any) -> str:
    """Short; arrays with the turn that they name."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape} {value.ravel()[:3].tolist()}..."
    text = repr(value)
    return text if len(text) < 200 else text[:200] + "..."
