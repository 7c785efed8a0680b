"""The expected state of a run, and the invariants of everything that its programs read.

An object that is read is complete and unchanged. A result contains each of its listed contributors
exactly once in every byte, and has the same bits wherever it is read. Every error is caused by a
fault.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import errors
from hoplite_mp._common.object_states import KIND_PUT
from hoplite_mp._simulation.oracle.values import (
    FaultyLeaf,
    WrongBytes,
    contributors_in,
    reduced,
    runs,
)

if TYPE_CHECKING:
    from hoplite_mp._simulation.oracle.values import Array, Leaf
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["ExpectedOperation", "Oracle", "WrongEnd", "leftovers"]


# Errors that a program may get when hosts die, are cut off, or cannot be reached.
LOSSES = (
    errors.ObjectLostError,
    errors.NodeLostError,
    errors.ReduceError,
    errors.WorkerLostError,
    errors.ManagerLostError,
    errors.PeerLostError,
    CancelledError,  # for a task whose submitter is lost with its host
)


# ValueErrors about nodes that the caller does not know yet or no longer knows.
NO_NODE = (
    "there is no node ",
    "copies=2: each copy needs a different node",
    "no node of this cluster",
)


# Errors of a leaving node, which starts no actors, and whose actors accept no calls.
REFUSED = errors.ActorLostError, errors.NodeLostError


# Part of the error of a Group that lost members before it was formed.
UNFILLED = "group_wait_s"


TRIES = 4  # runs of a task: 1 + Config.retries


class WrongEnd(AssertionError):
    """An operation ended incorrectly, or did not end."""


@dataclass(frozen=True)
class ExpectedOperation:
    """A collective that a program has requested."""

    number: int
    kind: str
    leaves: tuple[Leaf, ...]
    num: int
    contributors_min: int  # fewer than num after a deadline
    ordered: bool = False
    groups: tuple[tuple[int, ...], ...] = ()  # one source of each contributes; empty: all
    op: Any = "sum"
    finite: bool = False  # sources that are not finite count as failed

    @property
    def salt(self) -> int:
        return self.leaves[0].salt

    @property
    def in_task(self) -> bool:
        """Whether a task folds the sources."""
        return self.finite or self.op != "sum"


class Oracle:
    """The expected state of one run. `reads`: number of checked values; `errors`: errors of
    programs."""

    def __init__(self, world: World) -> None:
        runs.clear()
        self.world = world
        self.reads = 0
        self.errors: list[str] = []
        self.small_stores = False  # stores or disks are small, so objects may be refused
        self._refused: set[str] = set()  # programs to which a full store has refused a request
        self.made_by: dict[str, str] = {}  # the result of a collective -> its requester
        self._results: dict[tuple[int, int], tuple[Any, bytes]] = {}
        self._wrong: list[tuple[str, VirtualHost | None]] = []
        self._contributors: list[
            tuple[tuple[object, int], tuple[Any, ...], VirtualHost | None]
        ] = []

    # -- values --------------------------------------------------------------------------------

    def check_leaf(self, leaf: Leaf, value: Array) -> None:
        """Checks a source that a program has read."""
        self.reads += 1
        if not np.array_equal(value, leaf.array()):
            raise WrongBytes(f"a copy of {leaf} holds {value[:8]}")

    def check_value(self, value: Array, expected: Array, what: str) -> None:
        """Checks any other value that a program has read."""
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
        """Checks a result, or one part of it, that a program has read. named: its contributors."""
        self.reads += 1
        if not operation.contributors_min <= len(named) <= operation.num or len(set(named)) != len(
            named
        ):
            raise WrongEnd(f"{operation.kind} of {operation.num} named {named}")
        for group in operation.groups:
            if len({*group} & {*named}) > 1:
                raise WrongEnd(f"{operation.kind} of one of {group} named {named}")
        order = [index for group in operation.groups for index in group if index in named] or named
        leaves = [operation.leaves[index] for index in order]
        if operation.finite and any(isinstance(leaf, FaultyLeaf) for leaf in leaves):
            raise WrongEnd(f"{operation.kind} of finite sources named {named}")
        whole = leaves[0].array()
        if operation.in_task:
            whole = reduced(operation.op, [leaf.array() for leaf in leaves])
        elif operation.ordered:  # folded from the left, in the order of the sources or groups
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
            raise WrongBytes(
                f"{operation.kind} {operation.number} has different bits on different hosts"
            )

    def note_call(self, call: tuple[object, int], ranks: tuple[Any, ...]) -> None:
        """Records the contributors of a call that the running member of a Group has received."""
        running = self.world.processes.running
        self._contributors.append((call, ranks, self.world.host_of(running)))

    def note_wrong(self, what: str) -> None:
        """Records that the running program received a value that the oracle cannot explain. This is
        an error unless the host stops before the end of the run: a host that was declared lost may
        finish a call that the other hosts have repeated."""
        self._wrong.append((what, self.world.host_of(self.world.processes.running)))

    def check_runs(self) -> None:
        """Checks that no task has run more than TRIES times."""
        for task, count in runs.items():
            if count > TRIES:
                raise WrongEnd(f"the task that makes {task} has run {count} times")

    def check_members(self) -> None:
        """Checks that no host has been declared lost without a fault."""
        world = self.world
        disturbed = world.cuts or world.resets or world.stops or world.managers or world.crawls
        if world.excluded and world.incarnations[0].alive and not disturbed:
            raise WrongEnd(f"host {world.excluded[0].place} was declared lost without a fault")

    def check_admitted(self) -> str:
        """Returns a host that was not admitted by the end of the run, or "". Hosts that tried to
        join while there was no manager do not count: their join has failed."""
        world = self.world
        managers = [one for one in (world.manager, world.standby) if one is not None]
        if any(one.decides for one in managers):
            for host in world.hosts:
                error = host.node.components.management.join_error
                if host.alive and host.number < 0 and not error:
                    return f"host {host.place} was not admitted"
        return ""

    def check_agreed(self) -> None:
        """Checks that all members on surviving hosts received the same contributors of each call,
        and correct values."""
        for what, host in self._wrong:
            if host is not None and host.alive:
                raise WrongBytes(what)
        seen: dict[tuple[object, int], tuple[Any, ...]] = {}
        for call, ranks, host in self._contributors:
            if host is not None and host.alive and seen.setdefault(call, ranks) != ranks:
                both = f"{seen[call]} and of {ranks}"
                raise WrongEnd(f"call {call[1]} of group {call[0]} is of {both}")

    # -- errors --------------------------------------------------------------------------------

    @property
    def is_undisturbed(self) -> bool:
        """Whether no fault has occurred that may cause errors."""
        world = self.world
        return not (world.lost or world.cuts or world.resets or world.stops or world.killed)

    def check_error(self, what: str, error: BaseException, holds: bool = False) -> None:
        """Records the error of a program. Raises it if no fault can have caused it. holds: no error
        is allowed."""
        if holds:
            raise WrongEnd(f"{what}: {type(error).__name__}: {error}, although no error is allowed")
        self.errors.append(f"{what}: {type(error).__name__}: {error}")
        unknown = isinstance(error, ValueError) and str(error).startswith(NO_NODE)
        unfilled = isinstance(error, errors.HopliteTimeoutError) and UNFILLED in str(error)
        full = isinstance(error, errors.StoreFullError) or (
            isinstance(error, errors.ReduceError)
            and isinstance(error.__cause__, errors.StoreFullError)
        )
        if self.small_stores and (unfilled or full):
            self._refused.add(what)
            return
        if not (unknown or unfilled or isinstance(error, LOSSES)):
            raise error
        host = self.world.host_of(self.world.processes.running)
        # A leaving host does not wait for new tasks of its programs.
        if host in self.world.leaving:
            return
        if (unknown or isinstance(error, REFUSED)) and self.world.leaving:
            return
        made = what.removeprefix("reader of ")
        if self.made_by.get(made, made) in self._refused:  # that program has ended early
            return
        if self.is_undisturbed and not isinstance(
            error, errors.PeerLostError
        ):  # a rank may have left
            raise WrongEnd(f"{what}: {type(error).__name__}: {error}, without a fault")


# Checks for leaks after the end of all programs of a run.
#
# A leak, a host that does not leave, or an outdated list of members may not affect any program, so
# it is only detected at the end of a run.


FUNCTION_BYTES_MAX = 1024
# Tables of nodes and managers that need not be empty: records of the host, its processes, other
# hosts and their links, handlers, logs of limited length.
LASTING_TABLES = {
    "ClusterMembership._ended", "ClusterMembership._gone", "ClusterMembership._living",
    "ClusterMembership._numbers", "ClusterNode._peer_handlers", "Counters._more",
    "Failover._endpoints", "GroupRegistry.ends", "HostGroups.bare_ends",
    "HostGroups.clean_ends", "HostGroups.ends", "Leases.preallocated_blocks",
    "LinkEstimator._samples", "LinkEstimator.full", "LinkEstimator.known",
    "LinkEstimator.peaks", "Links.counted", "Links.ends", "Links.links",
    "ManagerConnection._ends", "ManagerConnection._handlers", "ManagerConnection._measured",
    "ManagerConnection._sent", "MultiHostCalls._handlers",
    "NodeMembership.former_workers", "NodeMembership.gone", "NodeMembership.left",
    "NodeMembership.members",
    "OutboundTasks._offered", "OutboundTasks.runners", "Output.drivers", "Output.pipes",
    "OwnershipTransfer.numbers", "PathEstimator._received", "PathEstimator._sent_at",
    "PathEstimator._samples", "PathEstimator._when_slow", "PathEstimator.held",
    "PathEstimator.known", "PathEstimator.peaks", "Peers.by_host_id", "Peers.by_number",
    "Peers.own", "PlanCache._known", "PlanLog._records",
    "PendingMessages._by_generation", "ProgramCache._known",
    "RemoteOutput.others", "Requests._forget", "Requests._handlers", "Requests._latest",
    "Requests._unread", "ResourceLedger._sums", "ResourceLedger._used", "ResourceLedger.totals",
    "Resources.others", "Roster.by_host_id", "Roster.by_number", "Runners._all",
    "Runners._counted", "Runners._free", "Runners._with_capacity", "Store._handed", "Store.clients",
    "Store.leases", "Store.spans", "LinkSpeeds._latency", "LinkSpeeds._narrow", "LinkSpeeds._pairs",
    "TraceEvents._inbound_now", "TreeCache._latest", "TreeCache._packed",
    "WaitReports._more",
    "WorkerRecycling._gone", "WorkerRecycling._hosts", "Workers.all", "Workers.bags",
    "Workers.pipes", "Workers.pools", "Workers.queues", "_Rates._sorted", "_Rates.by_node",
}  # fmt: skip
PARTS = "hoplite_mp._node", "hoplite_mp._planner"
TABLES = dict, set, list, deque


def leftovers(world: World) -> str:
    """Returns a description of what remains after the end of all programs, or ""."""
    managers = [one for one in (world.manager, world.standby) if one is not None and one.decides]
    living = {one.number for one in world.hosts if one.alive and one.number >= 0}
    for host in world.hosts:
        if host.alive:
            found = _of_memory(host) or _of_tables(host.node, set())
            if not found and managers and host.number >= 0:
                found = _of_members(world, host, living)
            if found:
                return f"host {host.place} {found}"
    for manager in managers:
        found = _of_tables(manager.planner, set())
        if found:
            return f"the manager {found}"
    return ""


def _of_memory(host: VirtualHost) -> str:
    store = host.node.components.store
    store.purge_spilled()
    left = [one for one in host.client.scan() if not _is_a_function(host, one)]
    if left:
        return f"still has {left[:3]}"
    if host.disk.used:
        return f"still has {host.disk.used} bytes on disk"
    blocks = [payload for payload in store.leases if host.client.block_owner(payload)]
    return f"still has blocks {blocks[:3]}" if blocks else ""


def _of_tables(component: Any, seen: set[int]) -> str:
    """Inspects the tables of a component and of all components to which it refers."""
    for name, value in getattr(component, "__dict__", {}).items():
        if id(value) in seen:
            continue
        seen.add(id(value))
        table = f"{type(component).__name__}.{name}"
        if isinstance(value, TABLES):
            if not _is_empty(value) and table not in LASTING_TABLES:
                return f"still has {table} {str(value)[:200]}"
        elif type(value).__module__.startswith(PARTS):
            found = _of_tables(value, seen)
            if found:
                return found
    return ""


def _is_empty(table: Any) -> bool:
    """Whether the table is empty, or contains only empty tables."""
    if isinstance(table, dict):
        return all(isinstance(one, TABLES) and not one for one in table.values())
    return not table


def _of_members(world: World, host: VirtualHost, living: set[int]) -> str:
    assert host.cluster_node is not None
    if host in world.leaving:
        return "has not left"
    known = set(host.cluster_node.membership.members)
    if known != living:
        return f"has the members {sorted(known)}, expected {sorted(living)}"
    return ""


def _is_a_function(host: VirtualHost, header: dict[str, Any]) -> bool:
    """Whether this object is a function that a living worker keeps for further tasks."""
    owner = header["owner"]
    lives = owner in host.node.components.workers.all and header["refs"] == [owner]
    return lives and header["kind"] == KIND_PUT and header["size"] <= FUNCTION_BYTES_MAX
