"""What is true in a run, which its processes cannot know, and the invariants of all that they read.

An object that is read is complete and unchanged. A result contains each contributor that it names
exactly once in every byte, and has the same bits wherever it is read. Every error has a cause among
the faults.
"""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp._simulation.oracle.values import WrongBytes, contributors_in, runs

if TYPE_CHECKING:
    from hoplite_mp._simulation.oracle.values import Array, Leaf
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["ExpectedOperation", "Oracle", "WrongEnd"]

# Errors that a program may get when hosts die, are cut off, or cannot be reached.
LOSSES = (
    errors.ObjectLostError,
    errors.NodeLostError,
    errors.ReduceError,
    errors.WorkerLostError,
    errors.ManagerLostError,
    errors.PeerLostError,
    CancelledError,  # for a task whose submitter is gone with its host
)


# ValueErrors about nodes that the caller does not know yet, or no longer.
NO_NODE = "there is no node ", "copies=2: each needs a node", "no node of this cluster"


# Errors of a node that leaves, because it starts no more actors, and its actors take no more calls.
REFUSED = errors.ActorLostError, errors.NodeLostError


# Part of the error of a Group that lost members before it was complete.
UNFILLED = "group_wait_s"


TRIES = 4  # runs of a task: 1 + Config.retries


class WrongEnd(AssertionError):
    """Something ended as it must not, or did not end."""


@dataclass(frozen=True)
class ExpectedOperation:
    """A collective that a program has requested."""

    number: int
    kind: str
    leaves: tuple[Leaf, ...]
    num: int
    least: int  # the fewest contributors of a result: fewer than num after a deadline
    ordered: bool = False

    @property
    def salt(self) -> int:
        return self.leaves[0].salt


class Oracle:
    """The truth about one run. `reads`: number of values checked; `errors`: those that programs
    got."""

    def __init__(self, world: World) -> None:
        runs.clear()
        self.world = world
        self.reads = 0
        self.errors: list[str] = []
        self.tight = False  # stores or disks are small, and what does not fit is refused
        self._refused: set[str] = set()  # programs to which a full store has refused something
        self.made_by: dict[str, str] = {}  # the result of a collective -> the program that asked
        self._results: dict[tuple[int, int], tuple[Any, bytes]] = {}
        self._told: list[tuple[tuple[object, int], tuple[Any, ...], VirtualHost | None]] = []

    # -- values --------------------------------------------------------------------------------

    def check_leaf(self, leaf: Leaf, value: Array) -> None:
        """Checks a source that was read somewhere."""
        self.reads += 1
        if not np.array_equal(value, leaf.array()):
            raise WrongBytes(f"a copy of {leaf} holds {value[:8]}")

    def check_value(self, value: Array, expected: Array, what: str) -> None:
        """Checks any other value that was read."""
        self.reads += 1
        if not np.array_equal(value, expected):
            raise WrongBytes(f"{what} holds {value[:8]}")

    def check_result(
        self,
        operation: ExpectedOperation,
        part: int,
        parts: int,
        value: Array,
        named: tuple[int, ...],
    ) -> None:
        """Checks a result, or one part of it, that was read somewhere; `named`: its
        contributors."""
        self.reads += 1
        if not operation.least <= len(named) <= operation.num or len(set(named)) != len(named):
            raise WrongEnd(f"{operation.kind} of {operation.num} named {named}")
        leaves = [operation.leaves[index] for index in named]
        whole = leaves[0].array()
        if operation.ordered:  # folded from the left, in the order of the sources
            for leaf in leaves[1:]:
                whole = whole + leaf.array()
        else:
            whole = sum((leaf.array() for leaf in leaves[1:]), start=whole)
        expected = np.array_split(whole, parts)[part]
        if value.tobytes() != expected.tobytes():
            found = "other bits"
            if not operation.ordered and parts == 1:
                found = f"contributors {sorted(contributors_in(value.ravel(), operation.salt))}"
            raise WrongBytes(f"{operation.kind} {operation.number}: {found}, and {named} are named")
        seen = self._results.setdefault((operation.number, part), (named, value.tobytes()))
        if seen != (named, value.tobytes()):
            raise WrongBytes(f"{operation.kind} {operation.number} has other bits than elsewhere")

    def note_call(self, call: tuple[object, int], ranks: tuple[Any, ...]) -> None:
        """The running program, a member of a Group, was told that these ranks contributed to that
        call."""
        running = self.world.processes.running
        self._told.append((call, ranks, self.world.host_of(running)))

    def check_runs(self) -> None:
        """No task may have run more often than its tries allow."""
        for task, count in runs.items():
            if count > TRIES:
                raise WrongEnd(f"the task that makes {task} has run {count} times")

    def check_members(self) -> None:
        """No host may have been given up without a fault."""
        world = self.world
        disturbed = world.cuts or world.resets or world.stops or world.managers or world.crawls
        if world.gave_up and world.lives[0].alive and not disturbed:
            raise WrongEnd(f"host {world.gave_up[0].place} was given up, and nothing has happened")

    def check_let_in(self) -> str:
        """At the end of a run: names a host that was not admitted although it could have been; or
        "". A host that tried while there was no manager does not count: it has got an error."""
        world = self.world
        managers = [one for one in (world.manager, world.standby) if one is not None]
        if any(one.decides for one in managers):
            for host in world.hosts:
                told = host.node.components.management.join_error
                if host.alive and host.number < 0 and not told:
                    return f"host {host.place} was not let in"
        return ""

    def check_agreed(self) -> None:
        """All members on hosts that have survived must have been told the same about each call."""
        seen: dict[tuple[object, int], tuple[Any, ...]] = {}
        for call, ranks, host in self._told:
            if host is not None and host.alive and seen.setdefault(call, ranks) != ranks:
                both = f"{seen[call]} and of {ranks}"
                raise WrongEnd(f"call {call[1]} of group {call[0]} is of {both}")

    # -- errors --------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """Has nothing happened that may cause errors?"""
        world = self.world
        return not (world.lost or world.cuts or world.resets or world.stops or world.killed)

    def check_error(self, what: str, error: BaseException, holds: bool = False) -> None:
        """A program got this error; raises it again if no fault can explain it. holds: no error is
        allowed."""
        if holds:
            raise WrongEnd(f"{what}: {type(error).__name__}: {error}, which had to hold")
        self.errors.append(f"{what}: {type(error).__name__}: {error}")
        unknown = isinstance(error, ValueError) and str(error).startswith(NO_NODE)
        unfilled = isinstance(error, errors.HopliteTimeoutError) and UNFILLED in str(error)
        full = isinstance(error, errors.StoreFullError) or (
            isinstance(error, errors.ReduceError)
            and isinstance(error.__cause__, errors.StoreFullError)
        )
        if self.tight and (unfilled or full):
            self._refused.add(what)
            return
        if not (unknown or unfilled or isinstance(error, LOSSES)):
            raise error
        host = self.world.host_of(self.world.processes.running)
        # A host that leaves does not wait for what its programs submit meanwhile.
        if host in self.world.left:
            return
        if (unknown or isinstance(error, REFUSED)) and self.world.left:
            return
        made = what.removeprefix("reader of ")
        if self.made_by.get(made, made) in self._refused:  # that program has ended early
            return
        if self.calm and not isinstance(error, errors.PeerLostError):  # a rank may have left
            raise WrongEnd(f"{what}: {type(error).__name__}: {error}, and nothing has happened")
