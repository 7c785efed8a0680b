"""One operation on many nodes: its time, the theoretical lower bound, and its cost.

This evaluates plans for very many hosts. All links are equal, nothing fails, and every source is
ready, so the time depends on the plan and on the delays of messages. The planner's time is measured
on a real clock.
"""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp._common.ids import pack_id, pack_local
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.program import participants
from hoplite_mp._protocol.codec import encode
from hoplite_mp._protocol.messages import FetchComplete, HostMeasured, NodeJoined
from hoplite_mp._simulation.network import VirtualNetwork
from hoplite_mp._simulation.scale.node import (
    HOST_ID_BASE,
    MANAGER_HOST,
    CollectiveRequest,
    ScaleHost,
    ScaleNode,
)
from hoplite_mp._simulation.scale.streams import ScaleEngine, ScaleOracle, WrongCompletion
from hoplite_mp._simulation.timeline import Timeline

if TYPE_CHECKING:
    from hoplite_mp._protocol.messages import Distribute, NodeToManager
    from hoplite_mp._simulation.scale.node import Wait

__all__ = ["BLOCK_BYTES", "OPERATIONS", "ScaleRow", "ScaleWorld", "Size", "coarseness", "measure"]


# With more nodes than this, blocks have at least COARSE_BYTES, unless --block is given: a thousand
# nodes have a million streams. Longer blocks need fewer events, but a stripe shorter than a block
# is sent as a whole, so a transfer over two hops appears up to twice as slow.
COARSE_NODES = 128
COARSE_BYTES = 64 << 10
# The host that requests an operation, and holds the source of a broadcast or get. It is not the
# manager's host, whose link is busy sending plans.
REQUESTER = 1

OPERATIONS = ("broadcast", "get", "reduce", "allreduce", "reduce_scatter", "gather", "allgather")


@dataclass(frozen=True, slots=True)
class Size:
    """The parameters of one measurement."""

    nodes: int
    nbytes: int
    rate: float  # bytes per second in each direction
    latency_s: float
    least: int  # minimum length of a block


@dataclass(frozen=True, slots=True)
class ScaleRow:
    """The results. `bytes_a_node`: bytes sent by the manager; `step_s`: the planner's mean time for
    one message."""

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
    """Returns the default minimum length of a simulated block."""
    return COARSE_BYTES if nodes > COARSE_NODES else 0


def bound_s(operation: str, size: Size) -> float:
    """Returns the minimum time for equal links without latency."""
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
    gc.disable()  # many objects, but no garbage before the end
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
    requester, nodes = world.nodes[REQUESTER], world.nodes
    if operation == "get":  # on all nodes at the same time
        source = world.put(requester, nbytes)
        return [node.get(source) for node in nodes]
    if operation == "broadcast":
        return [requester.begin(CollectiveRequest(operation, (world.put(requester, nbytes),), 1))]
    sources = tuple(world.put(node, nbytes) for node in nodes)
    slices = {"reduce": 1, "allreduce": 1, "reduce_scatter": len(nodes)}.get(operation, 0)
    results = tuple(world.result(requester, nbytes // slices) for _ in range(slices))
    return [requester.begin(CollectiveRequest(operation, sources, len(sources), results))]


# Very many simulated nodes, the shipped planner, and the network between them.
#
# ScaleWorld implements the parts of _manager/loop.py that plans need, and counts messages, bytes
# and the planner's time. All links are equal and nothing fails; _simulation/virtual/ simulates
# faults.


BLOCK_BYTES = 256 << 10
EVENTS_MAX = 400_000_000
SECONDS_MAX = 1e6


class ScaleWorld:
    """One cluster. All nodes have joined, and the planner knows the rates of their links."""

    def __init__(
        self, nodes: int, rate: float, *, latency_s: float = 100e-6, least: int = 0
    ) -> None:
        """rate: bytes per second on each link, in each direction; least: the minimum length of a
        block."""
        self.timeline = Timeline(0)
        self.network = VirtualNetwork(self.timeline, latency_s, 0.0)
        self.oracle = ScaleOracle()
        self.planner = Planner()
        self.nodes: list[ScaleNode] = []
        self.messages = self.bytes_out = 0  # messages that the manager received or sent; bytes sent
        self.steps = 0
        self.step_s = self.step_s_max = 0.0  # real time spent in the planner
        self.copied_at = 0.0  # when the manager received the last report of a complete copy
        self.notes: list[str] = []
        hosts: list[ScaleHost] = []
        for number in range(nodes):
            self.network.add(rate, rate)
            engine = ScaleEngine(self.network, number, BLOCK_BYTES, least)
            hosts.append(ScaleHost(engine, self.oracle, hosts, self._take))
            self.nodes.append(ScaleNode(hosts[number]))
            self.planner.step(NodeJoined(HOST_ID_BASE + number, 1, 1), 0.0)
            self.planner.step(HostMeasured(number, rate, rate), 0.0)

    # ---- objects

    def put(self, node: ScaleNode, nbytes: int, ready_in: float = 0.0) -> bytes:
        """Creates an object of the node, which becomes ready after the given time. Returns its
        id."""
        object_id = self._new_id(node, nbytes, 1)
        if ready_in:
            self.timeline.after(ready_in, self._ready, node, object_id)
        else:
            self._ready(node, object_id)
        return object_id

    def _ready(self, node: ScaleNode, object_id: bytes) -> None:
        node.host.put(object_id)
        node.ready(object_id)

    def result(self, node: ScaleNode, nbytes: int) -> bytes:
        """Returns an id for the result of a collective that this node requests."""
        return self._new_id(node, nbytes, 2)

    def _new_id(self, node: ScaleNode, nbytes: int, slot: int) -> bytes:
        count = len(self.oracle.sizes) + 1
        local = pack_local(slot, count >> 16, count & 0xFFFF)
        object_id = pack_id(HOST_ID_BASE + node.host.number, local)
        self.oracle.sizes[object_id] = nbytes
        return object_id

    # ---- the manager

    @property
    def stripe_plan(self) -> str:
        """The last stripe plan, as the planner describes it; "-" if there was none."""
        if not self.notes:
            return "-"
        words = self.notes[-1].rpartition(": ")[2].split(",")[0].split()
        return " ".join(words[:4])

    def _take(self, message: NodeToManager) -> None:
        # All links are equal, so no trees are packed. There are no deadlines, so no tick is needed.
        if isinstance(message, FetchComplete):
            self.copied_at = self.timeline.now
        began = time.perf_counter()  # only for the table: the run does not depend on it
        plan = self.planner.step(message, self.timeline.now)
        seconds = time.perf_counter() - began
        self.steps += 1
        self.step_s += seconds
        self.step_s_max = max(self.step_s_max, seconds)
        self.messages += 1 + len(plan.sends)
        self.notes += plan.notes
        encoded: tuple[object, int] = (None, 0)
        for number, sent in plan.sends:
            if encoded[0] is not sent:  # a plan for many nodes is encoded once
                encoded = (sent, len(encode(sent)))
            self.bytes_out += encoded[1]
            manager = self.nodes[MANAGER_HOST].host
            manager.send(number, encoded[1], self.nodes[number].receive, sent)

    # ---- running

    def play(self, plan: Distribute) -> float:
        """Executes one plan that copies a new object from its source. Returns the seconds until the
        manager has received the report of the last copy."""
        object_id = self.put(self.nodes[plan.sources[0]], plan.nbytes)
        plan = msgspec.structs.replace(plan, object=object_id)
        for node in participants(plan):
            self.nodes[node].receive(plan)
        ended = self.timeline.run(EVENTS_MAX, SECONDS_MAX)
        missing = [n for n in plan.receivers if object_id not in self.nodes[n].host.holds]
        if missing or not ended:
            raise WrongCompletion(f"{plan} sends nothing to {missing}")
        return self.copied_at

    def run(self, waits: list[Wait]) -> float:
        """Runs until there are no more events. Returns the time at which the last wait ended."""
        if not self.timeline.run(EVENTS_MAX, SECONDS_MAX):
            raise WrongCompletion(f"{waits} do not end")
        ended = [wait.ended_at for wait in waits if wait.ended_at is not None]
        if len(ended) < len(waits):
            raise WrongCompletion(f"{[wait for wait in waits if wait.ended_at is None]} never end")
        # Nothing may remain in the planner or on any host.
        reductions, entries = self.planner.reductions, self.planner.copies.entries.values()
        left: list[object] = [
            *reductions.operations,
            *(epoch for entry in entries for epoch in entry.transfers),
            *(node for entry in entries for node in entry.receiving),
        ]
        for node in self.nodes:
            engine = node.host.engine
            left += [*node.executions.copying, *node.executions.parts, *node.host.reads]
            left += [*engine.waiting, *(cell.key for cell in engine.cells)]
        if left or reductions.wake_at is not None:
            raise WrongCompletion(f"after the last event there remains {left}")
        return max(ended)
