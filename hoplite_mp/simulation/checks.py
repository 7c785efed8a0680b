"""What is true in a run, known by nobody in it, and what must hold of everything that is seen.

Why it exists: the promises are checked to the byte. An object that is read holds itself, whole. A
result holds each contributor exactly once, in every byte, and those that its commit names; it is
made of the same additions wherever it is, so it has the same bits. What fails, fails for a reason
that a fault explains.
It must never know: how anything came about.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from hoplite_mp.protocol.fields import FOLDING
from hoplite_mp.simulation.contents import Contents
from hoplite_mp.simulation.memory import Memory, Range
from hoplite_mp.simulation.streams import WrongBytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp.protocol.messages import Commit, ExecuteReduce
    from hoplite_mp.simulation.asks import Ask
    from hoplite_mp.simulation.contents import Content
    from hoplite_mp.simulation.imitated import ImitatedNode, ImitatedWorld

__all__ = ["Truth", "WrongEnd", "check_quiet"]


class WrongEnd(AssertionError):
    """Something ended as it must not, or did not end."""


class Truth:
    """Of one run."""

    def __init__(self, tracked: bool = True) -> None:
        """tracked: is it known what is in a byte? Else only when it comes."""
        self.tracked = tracked
        self.contents = Contents()
        self.sizes: dict[bytes, int] = {}
        self.pending: dict[
            bytes, ImitatedNode
        ] = {}  # objects that are not ready yet, and who makes them
        self.results: set[bytes] = set()  # objects that are results of collectives
        self.rows: dict[bytes, list[Range]] = {}  # of those that were committed somewhere
        self.commits: dict[int, Commit] = {}
        self.asks: dict[int, tuple[Ask, ImitatedNode]] = {}
        self.commits_checked = 0
        self._members: dict[tuple[int, int], Memory] = {}

    def remember(self, ask: Ask, node: ImitatedNode) -> None:
        """A collective that was asked for."""
        self.asks[ask.number] = ask, node

    def is_pending(self, object_id: bytes) -> bool:
        """Will it become ready one day, if nothing happens?"""
        maker = self.pending.get(object_id)
        return maker is not None

    def settle(self, objects: Iterable[bytes]) -> None:
        """They are ready now, or never will be."""
        for object_id in objects:
            self.pending.pop(object_id, None)

    # ---- bytes

    def member(self, plan: ExecuteReduce, index: int) -> Memory:
        """The bytes of a source as a member of that operation, of which they say the index."""
        name = plan.operation, index
        found = self._members.get(name)
        if found is None:
            found = self._members[name] = Memory(plan.nbytes, self.contents.leaf(name))
        return found

    def check_sealed(self, object_id: bytes, memory: Memory) -> None:
        """From now on others may read it."""
        if not self.tracked:
            return
        rows = _merged(memory)
        if object_id in self.results:
            if object_id not in self.rows:
                raise WrongBytes(f"{object_id.hex()} is read, and was never committed")
            if rows != self.rows[object_id]:
                raise WrongBytes(f"{object_id.hex()} has other bits than elsewhere: {rows}")
            return
        whole = _merged(Memory(self.sizes[object_id], self.contents.leaf(object_id)))
        if object_id in self.pending or rows != whole:
            raise WrongBytes(f"a copy of {object_id.hex()} holds {rows}")

    def check_result(
        self,
        plan: ExecuteReduce,
        commit: Commit,
        blocks: dict[int, Memory],
        bounds: list[tuple[int, int]],
    ) -> None:
        """A destination is told to seal these."""
        self._note(commit)
        if not self.tracked:
            return
        # What copies may end with fewer than were announced: nothing is made of them together.
        if plan.kind in FOLDING and commit.contributors != plan.members:
            raise WrongBytes(f"{commit} is about other members than {plan.members}")
        judged: dict[Content, None] = {}
        for index, memory in blocks.items():
            rows = _merged(memory)
            begin = bounds[index][0] if plan.kind == "reduce_scatter" else 0
            at = 0
            for row in rows:
                if row.begin != at or row.shift != begin:
                    raise WrongBytes(f"result {index} of {commit} has a gap, or moved bytes: {row}")
                at = row.end
                if row.content not in judged:
                    self._judge(plan, row.content)
                    judged[row.content] = None
            if at != memory.nbytes:
                raise WrongBytes(f"result {index} of {commit} ends at {at} of {memory.nbytes}")
            if rows != self.rows.setdefault(plan.results[index], rows):
                raise WrongBytes(f"result {index} of {commit} has other bits than elsewhere")
            self.commits_checked += 1

    def _judge(self, plan: ExecuteReduce, content: Content) -> None:
        leaves = content.leaves()
        expected = [(plan.operation, index) for index in plan.order]
        if Counter(leaves) != Counter(expected):
            raise WrongBytes(f"contributors {sorted(map(str, leaves))}, not {plan.members}")
        if plan.rule == "fold" and leaves != expected:
            raise WrongBytes(f"contributors are folded as {leaves}, not as {plan.order}")

    def _note(self, commit: Commit) -> None:
        if self.commits.setdefault(commit.operation, commit) != commit:
            raise WrongEnd(f"{commit} and {self.commits[commit.operation]}")

    # ---- ends

    def check_commit(self, ask: Ask, commit: Commit) -> None:
        """Who asked hears that it is done."""
        self._note(commit)
        wanted = ask.wanted
        self.settle(wanted.results)
        count = len(commit.contributors)
        least = 1 if wanted.deadline_s is not None else wanted.num
        if not least <= count <= wanted.num:
            raise WrongEnd(f"{count} contributors, and {wanted.num} were wanted")
        unready = [i for i in commit.contributors if wanted.sources[i] in self.pending]
        if unready:
            raise WrongEnd(f"contributors {unready} were not ready")
        if wanted.kind in FOLDING:
            return
        _, asker = self.asks[ask.number]
        for place, number in enumerate(commit.destinations):
            node = asker if number == asker.number else asker.members.get(number)
            if node is None:
                continue
            for index in commit.contributors:
                mine = place == index % len(commit.destinations)
                if wanted.kind == "alltoall" and not mine:
                    continue
                if wanted.sources[index] not in node.places.holds:
                    raise WrongEnd(f"{commit}, and node {number} has not got source {index}")


def check_quiet(world: ImitatedWorld) -> None:
    """Nothing happens any more: nobody waits, and nothing runs."""
    if world.waits.open:
        raise WrongEnd("; ".join(f"{wait} waits for ever" for wait in world.waits.open))
    planner = world.manager.planner
    left = [
        *planner.reductions.operations,
        *planner.reductions._deadlines,
        *planner.reductions._broadcasts,
        *(epoch for entry in planner.copies.entries.values() for epoch in entry.transfers),
        *(node for entry in planner.copies.entries.values() for node in entry.receiving),
        *planner.copies._busy,
    ]
    if left or planner.reductions.wake_at is not None:
        raise WrongEnd(f"the planner has not forgotten {left}")
    for node in world.hosts:
        engine = node.engine
        rest = {
            "plans of copies": list(node.copies.by_epoch),
            "fetches": [one.hex() for one in node.copies.fetching],
            "parts": list(node.parts.parts),
            "keys": list(engine.keys),
            "requests": [key for key, streams in engine.waiting.items() if streams],
            "pulls": [stream.key for stream in engine.pulls],
            "open cells": [engine.open_cells] * bool(engine.open_cells),
        }
        if any(rest.values()):
            found = {what: some for what, some in rest.items() if some}
            raise WrongEnd(f"node {node.number} on host {node.host} still has {found}")


def _merged(memory: Memory) -> list[Range]:
    """Its ranges, as few as there can be."""
    merged: list[Range] = []
    for row in memory.rows:
        last = merged[-1] if merged else None
        if last and (last.end, last.content, last.shift) == (row.begin, row.content, row.shift):
            merged[-1] = last._replace(end=row.end)
        else:
            merged.append(row)
    return merged
