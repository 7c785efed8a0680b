"""The resources of one node: totals, the amounts that tasks hold, and the order of waiting tasks.

Resources are GPUs, licences or shares of a disk. Tasks, actors and workers wait until enough of a
resource is free. This module only does the accounting, in integers, so that exhaustive tests are
possible. _node/tasks/resources.py receives the requests and applies the results.

Amounts are integers in units of 1/10000, so that ten times 0.1 is one. If the total of a resource
is an integer up to INDICES_MAX, the resource consists of pieces with the indices 0, 1, ... The
integer part of a demand is met by whole pieces. Its fraction shares a piece with other fractions.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hoplite_mp._protocol.resources import Demand

__all__ = [
    "INDICES_MAX",
    "UNITS",
    "Assigned",
    "Demand",
    "ResourceLedger",
    "WaitingRow",
    "WaitingRows",
    "amounts_of",
    "amounts_text",
    "as_amounts",
    "demand_words",
    "parse_amounts",
]

UNITS = 10_000
# Above this total, a resource has no indices: indices for a million bytes would be useless.
INDICES_MAX = 1024
AMOUNT_MAX = 1 << 40  # maximum amount of one resource; 1 TiB if the amount is in bytes
NAMES_MAX, NAME_CHARS_MAX = 64, 64
_NAME = re.compile(r"[^\s,=\0]{1,64}")

Assigned: TypeAlias = dict[str, list[int]]


def amounts_of(resources: Any, what: str = "resources") -> Demand:
    """Converts a dictionary such as {"gpu": 0.5} into sorted (name, units) pairs, without amounts
    of 0. Raises ValueError or TypeError if the dictionary is invalid."""
    if not isinstance(resources, Mapping):
        raise TypeError(f'{what}={resources!r}: it must be a dictionary, such as {{"gpu": 1}}')
    if len(resources) > NAMES_MAX:
        raise ValueError(f"{what} has {len(resources)} names: at most {NAMES_MAX} are allowed")
    found = []
    for name, amount in resources.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"{what}={resources!r}: the name {name!r} must be a string of 1 to "
                f"{NAME_CHARS_MAX} characters, without spaces, commas or equals signs"
            )
        units = _units(amount)
        if units is None:
            raise ValueError(
                f"{what}={resources!r}: the amount of {name!r} must be a number from 1/{UNITS} up "
                f"to {AMOUNT_MAX}, or 0"
            )
        if units:
            found.append((name, units))
    return tuple(sorted(found))


def _units(amount: Any) -> int | None:
    """Converts an amount into units of 1/10000, rounded down so that three thirds fit into one.
    Returns None if the amount is not valid."""
    # float() would also accept strings and bytes-like objects.
    kind = type(amount)
    if kind is bool or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        return None
    try:
        exact = float(amount)
    except (TypeError, ValueError, OverflowError):
        return None
    if not math.isfinite(exact) or not 0 <= exact <= AMOUNT_MAX:
        return None
    units = math.floor(exact * UNITS + 1e-6)
    return None if exact and not units else units


def parse_amounts(text: str) -> Demand:
    """Parses a command-line argument such as "gpu=2,disk=0.5". Raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, amount = (one.strip() for one in part.partition("="))
        try:
            if not equals or name in found:
                raise ValueError
            found[name] = float(amount)
        except ValueError:
            raise ValueError(
                f"resources {text!r}: {part.strip()!r} is not understood; write names with "
                'amounts, each once, such as "gpu=2,disk=0.5"'
            ) from None
    return amounts_of(found)


def amounts_text(units: Demand) -> str:
    """Formats a demand as text that parse_amounts() accepts."""
    return ",".join(f"{name}={amount!r}" for name, amount in as_amounts(units).items())


def as_amounts(units: Demand) -> dict[str, float]:
    """Converts a demand into the form that users write."""
    return {
        name: amount // UNITS if amount % UNITS == 0 else amount / UNITS for name, amount in units
    }


def demand_words(demand: Demand) -> str:
    """Formats a demand for messages: "gpu 1, disk 0.5"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in as_amounts(demand).items())


class ResourceLedger:
    """A node's resources, and the parts of them that each holder has. A holder is any hashable
    value."""

    def __init__(self, totals: Demand = ()) -> None:
        self.totals = dict(totals)
        # For each resource with indices: index -> units in use.
        self._used: dict[str, dict[int, int]] = {
            name: {} for name, units in totals if _has_indices(units)
        }
        self._sums = dict.fromkeys(self.totals, 0)  # units in use, by resource
        # Holder -> its parts: (name, index or None, units).
        self._held: dict[Any, list[tuple[str, int | None, int]]] = {}

    def __contains__(self, who: Any) -> bool:
        return who in self._held

    @property
    def is_unused(self) -> bool:
        """Whether nothing is held."""
        return not self._held

    def free(self) -> Demand:
        """The units of each resource that are not held."""
        return tuple((name, units - self._sums[name]) for name, units in self.totals.items())

    def could_ever(self, demand: Demand) -> bool:
        """Whether the demand could be met if nothing were held."""
        return all(units <= self.totals.get(name, 0) for name, units in demand)

    def fits(self, demand: Demand) -> bool:
        """Whether the demand can be met now."""
        return self._find(demand) is not None

    def take(self, who: Any, demand: Demand) -> Assigned | None:
        """Assigns the demanded parts to `who`, which must hold nothing yet. Returns the assigned
        indices by name (an empty list for a resource without indices), or None if not enough is
        free."""
        assert who not in self._held
        found = self._find(demand)
        if found is None:
            return None
        self._held[who] = found
        for name, index, units in found:
            self._sums[name] += units
            if index is not None:
                used = self._used[name]
                used[index] = used.get(index, 0) + units
        return self.assigned(who)

    def assigned(self, who: Any) -> Assigned:
        """The indices that `who` holds, by name."""
        found: Assigned = {}
        for name, index, _ in self._held.get(who, ()):
            found.setdefault(name, []).extend([] if index is None else [index])
        return {name: sorted(indices) for name, indices in found.items()}

    def give_back(self, who: Any) -> bool:
        """Frees all parts of `who`. Returns False if it had none."""
        held = self._held.pop(who, None)
        for name, index, units in held or ():
            self._sums[name] -= units
            if index is not None:
                used = self._used[name]
                used[index] -= units
                if not used[index]:
                    del used[index]
        return held is not None

    def times(self, demand: Demand, most: int, now: bool) -> int:
        """How many times that demand can be met simultaneously, at most `most`. `now`: count only
        the free parts, instead of all parts."""
        trial = ResourceLedger(tuple(self.totals.items()))
        if now:
            trial._sums = dict(self._sums)
            trial._used = {name: dict(used) for name, used in self._used.items()}
        count = 0
        while count < most and trial.take(count, demand) is not None:
            count += 1
        return count

    def _find(self, demand: Demand) -> list[tuple[str, int | None, int]] | None:
        """The free parts that would meet that demand. None if not enough is free."""
        found: list[tuple[str, int | None, int]] = []
        for name, units in demand:
            if units > self.totals.get(name, 0) - self._sums.get(name, 0):
                return None
            used = self._used.get(name)
            if used is None:
                found.append((name, None, units))
                continue
            whole, part = divmod(units, UNITS)
            shared = None
            if part:  # use the fullest piece into which the fraction fits, to keep others free
                able = [(-in_use, at) for at, in_use in used.items() if in_use + part <= UNITS]
                shared = min(able)[1] if able else None
            needed = whole + (part > 0 and shared is None)
            count = self.totals[name] // UNITS
            if needed > count - len(used):
                return None
            unused = (index for index in range(count) if index not in used)
            found += [(name, next(unused), UNITS) for _ in range(whole)]
            if part:
                found.append((name, next(unused) if shared is None else shared, part))
        return found


def _has_indices(units: int) -> bool:
    return units % UNITS == 0 and units <= INDICES_MAX * UNITS


@dataclass(slots=True)
class WaitingRow:
    """Tasks and workers that wait for the same demand on the same nodes."""

    demand: Demand
    where: Any  # identifies the nodes for the caller
    # True if a task that holds resources may be waiting for these members. The members may then use
    # resources that are reserved for earlier rows. Otherwise there could be a deadlock, because the
    # earlier rows may be waiting for the resources of that task.
    needed: bool = False
    members: list[tuple[Any, Any]] = field(default_factory=list)  # a heap of (rank, who)
    # While no node has the total amount: an object that identifies this period. Otherwise None.
    lost: object | None = None
    given_up: bool = False  # this period has lasted too long

    @property
    def key(self) -> Any:
        """The row's key in `WaitingRows.rows`."""
        return self.demand, self.where, self.needed


class WaitingRows:
    """All waiting tasks and workers, grouped by demand. The cost of choosing the next task depends
    only on the number of different demands."""

    def __init__(self) -> None:
        self.rows: dict[Any, WaitingRow] = {}
        self.ranks: dict[Any, tuple[Any, Any]] = {}  # who -> (rank, key of its row)

    def __contains__(self, who: Any) -> bool:
        return who in self.ranks

    def add(self, who: Any, demand: Demand, where: Any, rank: Any, needed: bool = False) -> None:
        """Adds a waiting task or worker. rank: a unique number; the lowest rank is served first."""
        key = demand, where, needed
        row = self.rows.get(key)
        if row is None:
            row = self.rows[key] = WaitingRow(demand, where, needed)
        self.ranks[who] = rank, key
        heapq.heappush(row.members, (rank, who))

    def remove(self, who: Any) -> None:
        """Removes `who`. Its entry remains in the heap until it reaches the top."""
        known = self.ranks.pop(who, None)
        if known is not None:
            self._trim(known[1])

    def _trim(self, key: Any) -> None:
        row = self.rows[key]
        while row.members:
            rank, who = row.members[0]
            if self.ranks.get(who) == (rank, key):
                return
            heapq.heappop(row.members)
        del self.rows[key]

    def everybody(self, row: WaitingRow) -> list[Any]:
        """The members of that row, lowest rank first."""
        members = sorted(row.members, key=lambda member: member[0])
        return [who for rank, who in members if self.ranks.get(who) == (rank, row.key)]

    def first(self, skip: Container[Any]) -> WaitingRow | None:
        """Returns the row whose first member has the lowest rank, ignoring rows whose keys are in
        `skip`. Returns None if no row is left."""
        best: WaitingRow | None = None
        for key, row in self.rows.items():
            if key not in skip and (best is None or row.members[0][0] < best.members[0][0]):
                best = row
        return best
