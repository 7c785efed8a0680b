"""Packed trees for LANs that are no star: asked for once, used when they are there.

Why it exists: packing takes seconds, and a plan does not wait for it. The first spread between some
nodes goes by stripes and asks; later ones are given the trees, as long as the links are the same.

This module must never know how trees are packed, nor what is spread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.planner import forest
from hoplite_mp.planner.packing import PackingWanted
from hoplite_mp.protocol.messages import Distribute

if TYPE_CHECKING:
    from hoplite_mp.planner.packing import TreesPacked
    from hoplite_mp.planner.topology import Topology

__all__ = ["Trees"]

# Nodes of the largest spread for which trees are packed when the LAN is no star. Packing 16 takes
# 4 s of a thread that shares the interpreter with the manager's loop, 32 would take 50 s.
PACKED_NODES_MAX = 16
# Packings that are kept: one a few kilobytes.
PACKINGS_MAX = 64


class Trees:
    """What was packed, and what is to be."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._packed: dict[PackingWanted, TreesPacked | None] = {}  # None: asked for
        self.wanted: list[PackingWanted] = []  # taken by the machine

    def take(self, trees: TreesPacked) -> None:
        """The answer to a PackingWanted: for the next spread between these nodes."""
        while len(self._packed) >= PACKINGS_MAX:
            del self._packed[next(iter(self._packed))]
        self._packed[trees.wanted] = trees

    def used_by(self, plan: Distribute, notes: list[str]) -> Distribute:
        """The plan along packed trees, if there are any yet; else they are asked for."""
        nodes = (plan.sources[0], *plan.receivers)
        if len(nodes) > PACKED_NODES_MAX or self._topology.is_star(nodes):
            return plan
        wanted = PackingWanted.between(nodes, self._topology)
        packed = self._packed.get(wanted)
        if packed is None:
            if wanted not in self._packed:
                self._packed[wanted] = None  # asked for once
                self.wanted.append(wanted)
            return plan
        stripes = forest.cut([(plan.sources[0], rate) for rate, _ in packed.trees])
        rows = tuple(parents for _, parents in packed.trees)[: len(stripes)]
        notes.append(f"the LAN is no star: {len(rows)} packed trees, {packed.rate:.3g} B/s")
        return Distribute(
            plan.operation,
            plan.object,
            plan.epoch,
            plan.nbytes,
            plan.sources[:1],
            plan.receivers,
            stripes,
            "parents",
            rows,
        )
