"""Cells of plans that only copy, into fresh blocks of this node.

Why it exists: a Group's large copies belong to one call: they are not known under the ids of the
objects that they are copies of, so they need no header before they are whole.
It must never know: who wants them, what becomes of the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.collectives.parts import NotNow
from hoplite_mp.node.ranges import Ranges
from hoplite_mp.protocol.messages import Distribute
from hoplite_mp.protocol.stripes import copy_offset

if TYPE_CHECKING:
    from hoplite_mp.node.collectives.folding import MakeCell
    from hoplite_mp.node.collectives.parts import Part
    from hoplite_mp.node.objects.results import Results
    from hoplite_mp.node.ports import Key
    from hoplite_mp.planner.program import Pull
    from hoplite_mp.protocol.messages import ExecuteReduce

__all__ = ["fill_blocks"]


def fill_blocks(results: Results, part: Part, make: MakeCell) -> None:
    """Makes all cells; the pulls are queued. NotNow: there is no room yet. Blocks of what comes
    are `part.blocks`, by the plan's index of the member; 0 for the one object of a Distribute."""
    plan = part.plan
    if isinstance(plan, Distribute):
        _spread(results, part, make, plan)
    else:
        _gather(results, part, make, plan)


def _block(results: Results, part: Part, index: int, object_id: bytes, nbytes: int) -> Any:
    """Fresh, or the one that an earlier plan has begun to fill."""
    if index not in part.blocks:
        begun = part.left.copies.pop(object_id, None)
        payload = results.lease(nbytes) if begun is None else begun.payload
        if payload is None:
            raise NotNow(
                "the object that arrives does not fit into the store beside what is in use"
            )
        part.blocks[index] = payload, nbytes
        part.come[object_id] = Ranges() if begun is None else begun.come
    return results.client.memory(part.blocks[index][0], nbytes)


def _pulled(
    part: Part,
    make: MakeCell,
    object_id: bytes,
    memory: Any,
    stripe: tuple[int, int],
    shown: Key | None,
    pull: tuple[int, Key],
) -> None:
    """What is missing of a stripe, from its first gap on."""
    begin, end = stripe
    there = part.come[object_id].reach(begin, end)
    cell = make(part, shown, memory, begin, end - begin, there)
    if there < end - begin:
        part.fills[cell] = object_id, begin, begin + there
        part.pulls[cell] = pull
        part.queue.append(cell)
        part.missing.add(cell)


def _own(part: Part, make: MakeCell, index: int, key: Key | None, begin: int, nbytes: int) -> None:
    """A cell over bytes of a member that is here."""
    come = part.written(index, begin, nbytes)
    cell = make(part, key, part.views[index], begin, nbytes, come)
    part.follow(index, cell, begin, nbytes)


def _spread(results: Results, part: Part, make: MakeCell, plan: Distribute) -> None:
    program = part.program
    receives = results.client.number in plan.receivers
    memory = _block(results, part, 0, plan.object, plan.nbytes) if receives else part.views[0]
    pulled: dict[int, Pull] = {pull.cell.stripe: pull for pull in program.pulls}
    served = {serve.cell.stripe for serve in program.serves}
    for index, stripe in enumerate(plan.stripes):
        if index not in pulled and index not in served:
            continue
        begin = copy_offset(plan.nbytes, stripe.begin_share)
        end = copy_offset(plan.nbytes, stripe.end_share)
        key = (plan.operation, plan.epoch, index, 0)
        shown = key if index in served else None
        if index in pulled:
            pull = pulled[index].parent, key
            _pulled(part, make, plan.object, memory, (begin, end), shown, pull)
        else:
            _own(part, make, 0, shown, begin, end - begin)


def _gather(results: Results, part: Part, make: MakeCell, plan: ExecuteReduce) -> None:
    program = part.program
    # First all room, then the cells: whoever comes back for room makes no cell twice.
    blocks = {
        pull.cell: _block(results, part, index, plan.objects[index], plan.sizes[index])
        for pull in program.pulls
        for index in [pull.cell.stripe]
    }
    for serve in program.serves:
        index = serve.cell.stripe
        member = plan.members[index]
        key = (plan.operation, plan.epoch, index, serve.cell.part)
        _own(part, make, member, key, 0, len(part.views[member]))
    for pull in program.pulls:
        index = pull.cell.stripe
        key = (plan.operation, plan.epoch, index, pull.cell.part)
        whole = 0, plan.sizes[index]
        memory = blocks[pull.cell]
        _pulled(part, make, plan.objects[index], memory, whole, None, (pull.parent, key))
