"""One operation on many nodes: how long it takes, what no plan could beat, and what it costs.

Why it exists: a plan can be tried for more hosts than anybody has. All links are alike, nothing
goes wrong, and every node has its part ready; what is left is the plan, the way that messages have
to go, and the planner's own time, the only thing here that is measured on a real clock.
It must never know: how rows are shown.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import HostMeasured, NodeJoined
from hoplite_mp.simulation.asks import Wanted
from hoplite_mp.simulation.checks import WrongEnd, check_quiet
from hoplite_mp.simulation.timeline import Timeline
from hoplite_mp.simulation.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.simulation.host import Node
    from hoplite_mp.simulation.waits import Wait

__all__ = ["OPERATIONS", "Row", "Size", "coarseness", "measure"]

# From so many nodes on blocks are as long as that, unless somebody wants to wait: a thousand nodes
# have a million streams. Higher: less to play, and a stripe that is shorter moves as a whole, so
# what goes over two hops looks up to twice as slow.
COARSE_NODES = 128
COARSE_BYTES = 64 << 10
# So many nodes are followed to the byte; of more it is only known when their bytes come.
TRACKED_NODES_MAX = 128
EVENTS_MAX = 400_000_000
SECONDS_MAX = 1e6
# Who asks, and has the source of a broadcast: not the manager's host, whose link has plans to send.
ASKER = 1

OPERATIONS = ("broadcast", "get", "reduce", "allreduce", "reduce_scatter", "gather", "allgather")


@dataclass(frozen=True, slots=True)
class Size:
    """What is tried."""

    nodes: int
    nbytes: int
    rate: float  # bytes a second, each way
    latency_s: float
    least: int  # the shortest block


@dataclass(frozen=True, slots=True)
class Row:
    """What came out. `bytes_a_node`: what the manager sent; `step_s`: a message in the planner."""

    operation: str
    nodes: int
    nbytes: int
    seconds: float
    bound_s: float
    messages_a_node: float
    bytes_a_node: float
    step_s: float
    step_s_max: float
    forest: str
    blocks: int

    @property
    def ratio(self) -> float:
        """How many times the bound."""
        return self.seconds / self.bound_s


def coarseness(nodes: int) -> int:
    """The shortest block that is simulated if nobody says another."""
    return COARSE_BYTES if nodes > COARSE_NODES else 0


def bound_s(operation: str, size: Size) -> float:
    """What the links need at least, if all are alike and latency is nothing."""
    n, one = size.nodes, size.nbytes / size.rate
    if operation == "allreduce":
        return 2 * (n - 1) / n * one
    if operation == "reduce_scatter":
        return (n - 1) / n * one
    if operation in ("gather", "allgather"):
        return (n - 1) * one
    return one


def measure(operation: str, size: Size, seed: int) -> Row:
    """Plays it."""
    gc.disable()  # nothing here dies before the end, and there is much of it to look through
    try:
        return _measure(operation, size, seed)
    finally:
        gc.enable()
        gc.collect()


def _measure(operation: str, size: Size, seed: int) -> Row:
    world = World(
        Timeline(seed),
        latency_s=size.latency_s,
        least=size.least,
        tracked=size.nodes <= TRACKED_NODES_MAX,
    )
    _populate(world, size)
    manager, timeline = world.manager, world.timeline
    manager.forget_figures()
    waits = _ASKED[operation](world, size, operation)
    if not timeline.run(EVENTS_MAX, SECONDS_MAX):
        raise WrongEnd(f"{operation} on {size.nodes} nodes does not end")
    check_quiet(world)
    errors = [f"{wait}: {wait.outcome}" for wait in waits if wait.outcome]
    if errors:
        raise WrongEnd("; ".join(errors))
    return Row(
        operation,
        size.nodes,
        size.nbytes,
        max(wait.ended_at for wait in waits),
        bound_s(operation, size),
        sum(manager.messages.values()) / size.nodes,
        manager.bytes_out / size.nodes,
        manager.step_s / max(1, manager.steps),
        manager.step_s_max,
        manager.forest,
        world.network.blocks,
    )


def _populate(world: World, size: Size) -> None:
    """All nodes know each other and the planner knows their links: what n joins cost is not what is
    looked at."""
    planner = world.manager.planner
    members: dict[int, Node] = {}
    for number in range(size.nodes):
        node = world.add_host(size.rate, size.rate, members)
        planner.step(NodeJoined(node.home, node.incarnation, 1), 0.0)
        planner.step(HostMeasured(number, size.rate, size.rate), 0.0)
        world.manager.routes[number] = members[number] = node


def _spread(world: World, size: Size, operation: str) -> list[Wait]:
    asker = world.hosts[ASKER]
    source = world.put(asker, size.nbytes)
    return [asker.asks.begin(Wanted("broadcast", (source,), 1))]


def _gets(world: World, size: Size, operation: str) -> list[Wait]:
    """Everybody wants it by himself, at the same time."""
    source = world.put(world.hosts[ASKER], size.nbytes)
    return [node.asks.get(source) for node in world.hosts]


def _collect(world: World, size: Size, operation: str) -> list[Wait]:
    asker, hosts = world.hosts[ASKER], world.hosts
    sources = tuple(world.put(node, size.nbytes) for node in hosts)
    slices = {"reduce": 1, "allreduce": 1, "reduce_scatter": len(hosts)}.get(operation, 0)
    results = tuple(world.result(asker, size.nbytes // slices) for _ in range(slices))
    return [asker.asks.begin(Wanted(operation, sources, len(sources), results=results))]


_ASKED: dict[str, Callable[[World, Size, str], list[Wait]]] = {
    "broadcast": _spread,
    "get": _gets,
    **dict.fromkeys(("reduce", "allreduce", "reduce_scatter", "gather", "allgather"), _collect),
}
