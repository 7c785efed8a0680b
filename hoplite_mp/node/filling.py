"""Cells of plans that only copy, into fresh blocks of this node.

Why it exists: a Group's large copies belong to one call: they are not known under the ids of the
objects that they are copies of, so they need no header before they are whole.
It must never know: who wants them, what becomes of the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp.node.parts import NotNow
from hoplite_mp.node.transfers import copy_offset
from hoplite_mp.protocol.messages import Distribute

if TYPE_CHECKING:
    from hoplite_mp.node.folding import MakeCell
    from hoplite_mp.node.links import Key
    from hoplite_mp.node.main import Node
    from hoplite_mp.node.parts import Part
    from hoplite_mp.planner.program import Pull
    from hoplite_mp.protocol.messages import ExecuteReduce

__all__ = ["fill_blocks"]


def fill_blocks(node: Node, part: Part, make: MakeCell) -> None:
    """Makes all cells; the pulls are queued. NotNow: there is no room yet. Blocks of what comes
    are `part.blocks`, by the plan's index of the member; 0 for the one object of a Distribute."""
    plan = part.plan
    if isinstance(plan, Distribute):
        _spread(node, part, make, plan)
    else:
        _gather(node, part, make, plan)


def _block(node: Node, part: Part, index: int, nbytes: int) -> Any:
    if index not in part.blocks:
        payload = node.results.lease(nbytes)
        if payload is None:
            raise NotNow("what comes does not fit beside what is in use")
        part.blocks[index] = payload, nbytes
    return node.client.memory(part.blocks[index][0], nbytes)


def _pulled(part: Part, cell: int, node: int, key: Key) -> None:
    part.pulls[cell] = node, key
    part.queue.append(cell)
    part.missing.add(cell)


def _own(part: Part, make: MakeCell, index: int, key: Key | None, begin: int, nbytes: int) -> None:
    """A cell over bytes of a member that is here."""
    come = part.come(index, begin, nbytes)
    cell = make(part, key, part.views[index], begin, nbytes, come)
    part.follow(index, cell, begin, nbytes)


def _spread(node: Node, part: Part, make: MakeCell, plan: Distribute) -> None:
    program = part.program
    receives = node.number in plan.receivers
    memory = _block(node, part, 0, plan.nbytes) if receives else part.views[0]
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
            cell = make(part, shown, memory, begin, end - begin, False)
            _pulled(part, cell, pulled[index].parent, key)
        else:
            _own(part, make, 0, shown, begin, end - begin)


def _gather(node: Node, part: Part, make: MakeCell, plan: ExecuteReduce) -> None:
    program = part.program
    # First all room, then the cells: whoever comes back for room makes no cell twice.
    blocks = {
        pull.cell: _block(node, part, pull.cell.stripe, plan.sizes[pull.cell.stripe])
        for pull in program.pulls
    }
    for serve in program.serves:
        index = serve.cell.stripe
        member = plan.members[index]
        key = (plan.operation, plan.epoch, index, serve.cell.part)
        _own(part, make, member, key, 0, len(part.views[member]))
    for pull in program.pulls:
        index = pull.cell.stripe
        cell = make(part, None, blocks[pull.cell], 0, plan.sizes[index], False)
        key = (plan.operation, plan.epoch, index, pull.cell.part)
        _pulled(part, cell, pull.parent, key)
