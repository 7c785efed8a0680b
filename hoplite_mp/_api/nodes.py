"""The public interface to the nodes of a cluster, and their counters.

The node process identifies nodes by numbers. This module converts its replies to the objects and
names of the public API.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import TYPE_CHECKING, Any

from hoplite_mp import errors
from hoplite_mp._client.demands import WORKERS_MAX
from hoplite_mp._client.describing import cluster_words
from hoplite_mp._client.memory import whole
from hoplite_mp._common import clock
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._planner.resources import as_amounts
from hoplite_mp._protocol.local import (
    AddWorkers,
    DepartedNodes,
    DrainNode,
    JoinStatus,
    LeavingNodes,
    Members,
    Stats,
)

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._client.tracing import Trace

__all__ = [
    "WORKERS_MAX",
    "Node",
    "NodeCalls",
    "amount_words",
    "counters",
    "gone_nodes",
    "grow",
    "list_nodes",
    "named_places",
    "node_id",
    "node_numbers",
    "other_places",
    "own_node",
    "resource_words",
    "shrink",
    "standby_of",
    "with_counts",
    "working_places",
]

RESOURCE_COUNTERS = "resource:", "free:"  # prefixes of the names of counters for resources
# Interval at which `shrink` checks whether nodes have left. Lower: more round trips to the node.
# Higher: the caller waits longer than necessary.
LEAVING_POLL_S = 0.02


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Node:
    """The state of a living host at the time when `Cluster.nodes` was read.

    Attributes
    ----------
    id : str
        "h0", "h1" and so on, in the order in which nodes have joined; never reused.
    address : str
        The IP address that the node advertises to other nodes.
    host : str
        Its host name.
    workers : int
        The number of workers in its common pool.
    memory_used, memory_total : int
        The number of bytes in use in its store, and the store's limit.
    resources, resources_free : dict
        The amounts of its resources for `options(resources=)`, by name, and the free amounts.

    Examples
    --------
    >>> node = c.nodes[0]
    >>> node.id, node.workers
    ('h0', 2)
    """

    __module__ = "hoplite_mp"  # as users import it

    id: str
    address: str
    host: str
    workers: int
    memory_used: int
    memory_total: int
    resources: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    resources_free: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        workers = f"{self.workers} worker{'' if self.workers == 1 else 's'}"
        memory = f"{format_bytes(self.memory_used)} of {format_bytes(self.memory_total)}"
        free = "".join(f", {one} free" for one in resource_words(self))
        return f"Node({self.id} at {self.address}, {self.host}: {workers}, {memory} used{free})"


def resource_words(node: Node) -> list[str]:
    """The free and total amounts of a node's resources, for example ["gpu 1 of 2"]."""
    return amount_words(node.resources, node.resources_free)


def amount_words(amounts: Mapping[str, float], free: Mapping[str, float]) -> list[str]:
    """Like `resource_words`, for the given total and free amounts."""
    return [f"{name} {free.get(name, 0):g} of {amount:g}" for name, amount in amounts.items()]


def node_id(number: int) -> str:
    """3 -> "h3"."""
    return f"h{number}"


def standby_of(runtime: Runtime) -> tuple[tuple[str, ...], int, bool, bool]:
    """The state of the cluster's standby, as known to this host's node. Returns the standby's
    addresses, the preferred one first; the number of the node on the standby's host, or -1 if that
    node has not joined; whether the standby is the manager now; and whether there is a manager."""
    standing = runtime.channel.call(JoinStatus()).value
    return tuple(standing[2]), standing[4], standing[5], standing[6]


class NodeCalls:
    """The `Cluster` methods for nodes."""

    _runtime: Runtime

    @property
    def nodes(self) -> list[Node]:
        """The living nodes, in order of joining.

        Returns
        -------
        list of Node
            Their current state. Reading it costs one round trip to each node.

        Examples
        --------
        >>> [node.workers for node in c.nodes]
        [2]
        """
        return list_nodes(self._runtime, memory=True)

    @property
    def here(self) -> Node:
        """The node of this process; in a task, the node of the task's worker.

        Raises
        ------
        NodeLostError
            The cluster has declared this host lost.

        Examples
        --------
        >>> c.here.id
        'h0'
        """
        return own_node(self._runtime)

    def add_workers(self, n: int, node: Any = None) -> None:
        """Starts more workers for the cluster's tasks, even while tasks are running.

        The workers remain after this program has disconnected.

        Parameters
        ----------
        n : int
            The number of workers, 1 to 200.
        node : Node or str, optional
            The node on which they start. Default: this host.

        Raises
        ------
        ValueError
            `n` is out of range, or the node has never been in the cluster.
        NodeLostError
            The node is gone.

        Examples
        --------
        >>> with hoplite_mp.Cluster(workers=1) as small:
        ...     small.add_workers(1)
        ...     print(small.here.workers)
        2
        """
        grow(self._runtime, n, node)

    def remove_node(self, node: Any) -> None:
        """Removes nodes from the cluster without losing work, and waits until they are gone.

        A leaving node accepts no more tasks: `options(node=)` with only this node raises
        NodeLostError, and an actor that may run on several nodes starts on another node. Running
        tasks finish. Objects that only this node holds are copied to the other nodes whose
        processes hold refs to them; objects without refs on other nodes are dropped. The call does
        not wait for a generator that has already yielded an item: the generator runs again on
        another node, which counts against its `retries`. The node's actors finish the calls made so
        far; later calls raise ActorLostError. The node's `hoplite-mp join` exits with code 0, and a
        program that is connected through the node loses its cluster.

        Parameters
        ----------
        node : Node, str, or a list of them
            The nodes to remove.

        Raises
        ------
        ValueError
            The node is the manager's node, whose removal would stop the whole cluster, or the
            caller's own node (use `shutdown`).
        NodeLostError
            The node is already gone.

        Examples
        --------
        >>> c.remove_node(c.here)
        Traceback (most recent call last):
            ...
        ValueError: h0 is the caller's own node: ...
        """
        shrink(self._runtime, node)

    def __repr__(self) -> str:
        return f"<hoplite_mp.Cluster: {cluster_words(self)}>"

    def _repr_html_(self) -> str:
        """HTML for notebooks: the nodes with their workers, and their memory as bars."""
        from hoplite_mp._client.describing import cluster_html, in_time

        words = cluster_words(self)
        runtime: Runtime | None = self.__dict__.get("_runtime")
        if runtime is None or words == "closed":
            return cluster_html(words, None, None, "")
        nodes = in_time(lambda: list_nodes(runtime, memory=True))
        network = self.__dict__.get("_network")
        here = node_id(runtime.tasks.node_number) if nodes else ""
        return cluster_html(words, network and network.address, nodes, here)

    def stats(self) -> dict[str, Any]:
        """Counters since the start of the cluster.

        Returns
        -------
        dict
            `tasks_done`, `tasks_failed`, `tasks_retried`, `workers_lost`, `objects` (numbers);
            `bytes_used`, `bytes_limit`, `bytes_spilled`, `bytes_sent`, `bytes_received` (bytes):
            the sums over all nodes. "nodes" maps node ids to the same counters for each node,
            excluding nodes that do not answer. If any node has resources, `resources` and
            `resources_free` are dicts of the current amounts by name.

        Examples
        --------
        >>> stats = c.stats()
        >>> stats["bytes_used"] <= stats["bytes_limit"]
        True
        >>> sorted(stats["nodes"])
        ['h0']
        """
        found = counters(self._runtime)
        amounts = {number: take_amounts(one) for number, one in found.items()}
        names = list(next(iter(found.values())))
        total: dict[str, Any] = {
            name: sum(one.get(name, 0) for one in found.values()) for name in names
        }
        nodes: dict[int, dict[str, Any]] = {number: {**one} for number, one in found.items()}
        if any(all_ for all_, _ in amounts.values()):
            for at, what in enumerate(("resources", "resources_free")):
                sums = collections.Counter[str]()
                for number, both in amounts.items():
                    nodes[number][what] = as_amounts(tuple(both[at].items()))
                    sums.update(both[at])
                total[what] = as_amounts(tuple(sorted(sums.items())))
        return {**total, "nodes": {node_id(number): one for number, one in nodes.items()}}

    def trace(self, path: str | os.PathLike[str]) -> Trace:
        """Returns a context manager that records the cluster's work as a timeline in a file.

        Open the file at ui.perfetto.dev. It shows tasks by worker, transfers of objects between
        nodes, collectives, Group calls, and spilling. Work that is still running at the end of the
        block is recorded up to that time. Values up to 64 KiB, which are sent inside messages, are
        not shown. The complete file is written at the end of the block, even after an exception.

        Parameters
        ----------
        path : path-like
            The file to write, in the JSON trace event format.

        Returns
        -------
        context manager

        Raises
        ------
        OSError
            The file cannot be created. The call itself raises this error.
        RuntimeError
            The cluster is already being traced. Only one trace can run at a time.

        Notes
        -----
        Each node keeps the latest `Config.trace_events_max` events. The file contains the number of
        dropped events, the lost nodes, and the maximum errors of the nodes' clocks.

        Examples
        --------
        >>> with c.trace("run.json"):
        ...     c.submit(pow, 2, 3).result()
        8
        """
        from hoplite_mp._client.tracing import Trace

        trace = Trace(self._runtime, path)
        trace.cluster = self  # keeps this Cluster alive as long as the trace
        return trace


def take_amounts(counts: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Removes the resources from a node's counters. Returns their total amounts and free
    amounts."""
    found: tuple[dict[str, int], dict[str, int]] = {}, {}
    for into, prefix in zip(found, RESOURCE_COUNTERS, strict=True):
        for name in [name for name in counts if name.startswith(prefix)]:
            into[name.removeprefix(prefix)] = counts.pop(name)
    return found


def list_nodes(runtime: Runtime, memory: bool = False) -> list[Node]:
    """The living nodes, in order of joining. `memory`: whether to include the memory use of other
    nodes, which costs a round trip to all of them; otherwise it is 0."""
    runtime.memory.check()
    found = [
        Node(
            id=node_id(number),
            address=address,
            host=host,
            workers=workers,
            memory_used=used,
            memory_total=total,
            resources=as_amounts(resources),
            resources_free=as_amounts(free),
        )
        for number, address, host, workers, used, total, resources, free in runtime.channel.call(
            Members()
        ).value
    ]
    runtime.newest_node = max(runtime.newest_node, *(int(one.id[1:]) for one in found))
    if not memory or len(found) == 1:
        return found
    counted = {node_id(number): counts for number, counts in counters(runtime).items()}
    return [with_counts(one, counted[one.id]) if one.id in counted else one for one in found]


def with_counts(node: Node, counts: dict[str, int]) -> Node:
    """The same node, with the used memory and the free amounts from its counters."""
    _, free = take_amounts(dict(counts))
    amounts = as_amounts(tuple(free.items()))
    return dataclasses.replace(node, memory_used=counts["bytes_used"], resources_free=amounts)


def own_node(runtime: Runtime) -> Node:
    """The node of this process's host. Raises NodeLostError if the node is no longer in the
    cluster."""
    own = node_id(runtime.tasks.node_number)
    for node in list_nodes(runtime):
        if node.id == own:
            return node
    raise errors.NodeLostError(f"node {own!r} of this host is no longer in the cluster")


def gone_nodes(runtime: Runtime) -> list[tuple[str, str, float, bool]]:
    """The latest nodes that were lost or have left, as known to this host's node: for each node,
    its id, its host, the number of seconds since then, and whether it has left."""
    runtime.memory.check()
    found = runtime.channel.call(DepartedNodes()).value
    return [(node_id(number), host, seconds, left) for number, host, seconds, left in found]


def counters(runtime: Runtime) -> dict[int, dict[str, int]]:
    """The counters of every node that answers, by the node's number. They are 0 when the node
    starts."""
    runtime.memory.check()
    runtime.submitter.drain()
    runtime.memory.collect()
    return {number: dict(found) for number, found in runtime.channel.call(Stats()).value}


def node_numbers(
    runtime: Runtime, nodes: Any, one: str | None = None, workers: bool = False
) -> list[int]:
    """Converts a Node, a node id, or a list of them to node numbers. Raises NodeLostError for a
    node that is gone, and ValueError for a node that has never existed.

    `one`: the name of the argument in messages, if it must be exactly one node. `workers`: whether
    the nodes must have workers, and must not be leaving.
    """
    if nodes is None:
        return []
    wanted = list(nodes) if isinstance(nodes, (list, tuple)) else [nodes]
    if one is not None and len(wanted) != 1:
        raise ValueError(f"{one} names {len(wanted)} nodes: it must name exactly one")
    if not wanted:
        raise ValueError("the list of nodes, in node= or to=, is empty")
    living = {node.id: node for node in list_nodes(runtime)}
    found = []
    for node in wanted:
        name = node.id if isinstance(node, Node) else node
        if name not in living:
            has = f"this cluster has {', '.join(living)}"
            if isinstance(node, Node) or _was_there(name, runtime.newest_node):
                raise errors.NodeLostError(f"node {name!r} is gone: {has}")
            raise ValueError(f"there is no node {name!r}: {has}")
        number = int(name.removeprefix("h"))
        if workers and not living[name].workers:
            if number in runtime.channel.call(LeavingNodes()).value:
                raise errors.NodeLostError(f"node {name!r} is leaving the cluster")
            raise ValueError(f"node {name!r} has no workers: no task can run there")
        found.append(number)
    return found


def _was_there(name: Any, newest: int) -> bool:
    """Whether a node of that name has ever joined. Nodes are numbered in the order in which they
    join."""
    digits = name.removeprefix("h") if isinstance(name, str) else ""
    return digits.isdecimal() and int(digits) <= newest


def named_places(
    runtime: Runtime, node: Any, default: Sequence[int] | None
) -> list[tuple[int, int]]:
    """(number, workers) for each node in `node` or, if `node` is None, for each node in
    `default`."""
    numbers = list(default or ()) if node is None else node_numbers(runtime, node)
    have = {one.id: one.workers for one in list_nodes(runtime)} if numbers else {}
    return [(number, have.get(node_id(number), 0)) for number in numbers]


def working_places(runtime: Runtime) -> list[tuple[int, int]]:
    """(number, workers) for each node that has workers. If no node has any: [(this node, 1)]."""
    found = [(int(one.id[1:]), one.workers) for one in list_nodes(runtime) if one.workers]
    return found or [(runtime.tasks.node_number, 1)]


def other_places(runtime: Runtime, copies: Any, keep: Sequence[int] = ()) -> list[int]:
    """The nodes for all copies except the first. The order of preference is: living nodes in
    `keep`, which already have a copy; nodes with workers, because nodes without workers may exit
    with a program; other nodes. Within each of these groups, nodes are in order of joining,
    beginning after this node, so that copies from different nodes are placed on different nodes."""
    count = whole(copies)
    if count is None or count < 1:
        raise ValueError(f"copies={copies!r}: it must be a whole number, at least 1")
    if count == 1:
        return []
    nodes = [(int(one.id[1:]), one.workers) for one in list_nodes(runtime)]
    if count > len(nodes):
        raise ValueError(
            f"copies={count}: each copy needs a different node; this cluster has {len(nodes)}"
        )
    own = runtime.tasks.node_number
    after = sorted(
        nodes, key=lambda node: (node[0] not in keep, not node[1], node[0] < own, node[0])
    )
    return [number for number, _ in after if number != own][: count - 1]


def grow(runtime: Runtime, n: Any, node: Any) -> None:
    """Starts more workers in the common pool of one node; see `Cluster.add_workers`."""
    count = whole(n)
    if count is None or not 1 <= count <= WORKERS_MAX:
        raise ValueError(f"n={n!r}: it must be from 1 to {WORKERS_MAX}")
    own = runtime.tasks.node_number
    (number,) = node_numbers(runtime, node, "node=") or [own]
    runtime.channel.call(AddWorkers(count, number))
    sizes = runtime.pool_sizes
    if number != own:
        sizes.pop(0, None)  # not the only node with workers, so the pool's size is unknown
    elif 0 in sizes:
        sizes[0] += count


def shrink(runtime: Runtime, node: Any) -> None:
    """Removes nodes, and waits until they are gone; see `Cluster.remove_node`."""
    numbers = node_numbers(runtime, node)
    if not numbers:
        raise ValueError("node=None: name the node to remove")
    own = runtime.tasks.node_number
    if own in numbers:
        raise ValueError(
            f"{node_id(own)} is the caller's own node: it leaves when you call shutdown(), or "
            "stop the `hoplite-mp join` that has started it"
        )
    for number in numbers:
        runtime.channel.call(DrainNode(number))
    names = {node_id(number) for number in numbers}
    # Repeated short calls instead of one long call, because other threads of this process need the
    # channel, too.
    while names & {one.id for one in list_nodes(runtime)}:
        clock.sleep(LEAVING_POLL_S)
