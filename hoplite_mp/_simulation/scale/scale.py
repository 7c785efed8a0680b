"""One operation on many nodes: its time, a lower bound that no plan could beat, and its cost.

Plans can be tried for more hosts than anybody has. All links are alike, nothing fails, and every
source is ready; what remains is the plan, the delays of messages, and the planner's own time, which
alone is measured on a real clock.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp._simulation.scale.node import WantedCollective
from hoplite_mp._simulation.scale.world import ScaleWorld

if TYPE_CHECKING:
    from hoplite_mp._simulation.scale.host import Wait

__all__ = ["OPERATIONS", "ScaleRow", "Size", "coarseness", "measure"]

# With more nodes than this, blocks have at least COARSE_BYTES, unless --block says otherwise,
# because a thousand nodes have a million streams. Longer blocks need fewer events, but a stripe
# shorter than a block moves as a whole, so a transfer over two hops seems up to twice as slow.
COARSE_NODES = 128
COARSE_BYTES = 64 << 10
# The host that requests an operation, and that has the source of a broadcast or get. It is not the
# manager's host, whose link is busy sending plans.
ASKER = 1

OPERATIONS = ("broadcast", "get", "reduce", "allreduce", "reduce_scatter", "gather", "allgather")


@dataclass(frozen=True, slots=True)
class Size:
    """The parameters of one measurement."""

    nodes: int
    nbytes: int
    rate: float  # bytes per second in each direction
    latency_s: float
    least: int  # the shortest block


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """The results. `bytes_a_node`: sent by the manager; `step_s`: the planner's mean time for one
    message."""

    operation: str
    nodes: int
    nbytes: int
    seconds: float
    bound_s: float
    messages_a_node: float
    bytes_a_node: float
    step_s: float
    step_s_max: float
    stripe_plan: str
    blocks: int

    @property
    def ratio(self) -> float:
        """The time as a multiple of the bound."""
        return self.seconds / self.bound_s


def coarseness(nodes: int) -> int:
    """The shortest block that is simulated by default."""
    return COARSE_BYTES if nodes > COARSE_NODES else 0


def bound_s(operation: str, size: Size) -> float:
    """The time that the links need at least, if all are alike and latency is zero."""
    n, one = size.nodes, size.nbytes / size.rate
    if operation == "allreduce":
        return 2 * (n - 1) / n * one
    if operation == "reduce_scatter":
        return (n - 1) / n * one
    if operation in ("gather", "allgather"):
        return (n - 1) * one
    return one


def measure(operation: str, size: Size) -> ScaleRow:
    """Simulates one operation."""
    gc.disable()  # nothing here becomes garbage before the end, and there are many objects to scan
    try:
        world = ScaleWorld(size.nodes, size.rate, latency_s=size.latency_s, least=size.least)
        seconds = world.run(_begin(world, operation, size.nbytes))
        return ScaleRow(
            operation,
            size.nodes,
            size.nbytes,
            seconds,
            bound_s(operation, size),
            world.messages / size.nodes,
            world.bytes_out / size.nodes,
            world.step_s / max(1, world.steps),
            world.step_s_max,
            world.stripe_plan,
            world.network.blocks,
        )
    finally:
        gc.enable()
        gc.collect()


def _begin(world: ScaleWorld, operation: str, nbytes: int) -> list[Wait]:
    asker, nodes = world.nodes[ASKER], world.nodes
    if operation == "get":  # on all nodes at the same time
        source = world.put(asker, nbytes)
        return [node.get(source) for node in nodes]
    if operation == "broadcast":
        return [asker.begin(WantedCollective(operation, (world.put(asker, nbytes),), 1))]
    sources = tuple(world.put(node, nbytes) for node in nodes)
    slices = {"reduce": 1, "allreduce": 1, "reduce_scatter": len(nodes)}.get(operation, 0)
    results = tuple(world.result(asker, nbytes // slices) for _ in range(slices))
    return [asker.begin(WantedCollective(operation, sources, len(sources), results))]
