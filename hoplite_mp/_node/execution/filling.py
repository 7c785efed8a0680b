"""Makes the cells of plans that only copy. These cells fill blocks that belong to no object yet.

Copies of an object and large pieces of a Group's call are filled in the same way: only bytes that
no earlier plan has brought are pulled.
"""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.execution.plan_state import NotNow
from hoplite_mp._node.store.growing_block import Ranges
from hoplite_mp._protocol.fields import copy_offset
from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.execution.plan_cells import PlanCells
    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.remote_objects import Filler
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.objects.results import ResultWriter
    from hoplite_mp._node.ports import Key
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["Replicating", "fill_blocks"]


def fill_blocks(results: ResultWriter, execution: PlanState, cells: PlanCells) -> None:
    """Makes all cells and queues the pulls; raises NotNow if there is no memory yet. Afterwards
    `execution.blocks` has the block of each arriving object, by the member's index in the plan; 0
    for the one object of a Distribute."""
    plan = execution.plan
    if isinstance(plan, Distribute):
        _spread(results, execution, cells, plan)
    else:
        _gather(results, execution, cells, plan)


def _block(
    results: ResultWriter, execution: PlanState, index: int, object_id: bytes, nbytes: int
) -> Any:
    """The memory of a new block, or of the one that an earlier plan has begun to fill."""
    if index not in execution.blocks:
        begun = execution.carryover.copies.pop(object_id, None)
        payload = results.lease(nbytes) if begun is None else begun.payload
        if payload is None:
            raise NotNow(
                "the object that arrives does not fit into the store beside what is in use"
            )
        execution.blocks[index] = payload, nbytes if begun is None else begun.nbytes
        execution.arrived_before[object_id] = Ranges() if begun is None else begun.arrived
    return results.client.memory(*execution.blocks[index])


def _pulled(
    execution: PlanState,
    cells: PlanCells,
    object_id: bytes,
    memory: Any,
    stripe: tuple[int, int],
    shown: Key | None,
    pull: tuple[int, Key],
) -> list[int]:
    """Makes one cell for each missing range of a stripe and returns those cells. If there is only
    one missing range and it reaches to the stripe's end, its cell covers the whole stripe, and
    other nodes read that cell. Otherwise they read a separate cell that follows all of these."""
    begin, end = stripe
    arrived = execution.arrived_before[object_id]
    gaps = arrived.gaps(begin, end)
    if shown and not (len(gaps) == 1 and gaps[0][1] == end):
        cell = cells.make(execution, shown, memory, begin, end - begin, arrived.reach(begin, end))
        if gaps:
            execution.followed[cell] = begin, end
        shown = None
    made = []
    for first, last in gaps:
        cell = cells.make(execution, shown, memory, begin, last - begin, first - begin)
        execution.fills[cell] = object_id, begin, first
        execution.pulls[cell] = pull
        execution.missing.add(cell)
        made.append(cell)
    return made


def _spread(
    results: ResultWriter, execution: PlanState, cells: PlanCells, plan: Distribute
) -> None:
    program = execution.program
    memory: Any = None
    queued: dict[int, list[int]] = {}  # stripe -> its cells, in the order of the program's pulls
    if 0 not in execution.views:
        memory = _block(results, execution, 0, plan.object, plan.nbytes)
        queued = {pull.cell.stripe: [] for pull in program.pulls}
    parents = {pull.cell.stripe: pull.parent for pull in program.pulls}
    served = {serve.cell.stripe for serve in program.serves}
    for index, stripe in enumerate(plan.stripes):
        begin = copy_offset(plan.nbytes, stripe.begin_share)
        end = copy_offset(plan.nbytes, stripe.end_share)
        key = (plan.operation, plan.epoch, index, 0)
        shown = key if index in served else None
        if index in queued:
            pull = parents[index], key
            queued[index] = _pulled(
                execution, cells, plan.object, memory, (begin, end), shown, pull
            )
        elif shown:
            cells.own(execution, shown, 0, execution.views[0], begin, end - begin)
    execution.queue += chain.from_iterable(queued.values())


def _gather(
    results: ResultWriter, execution: PlanState, cells: PlanCells, plan: ExecuteReduce
) -> None:
    program = execution.program
    # Lease all blocks before making any cell: NotNow makes the caller try again, and no cell may be
    # made twice.
    blocks = {
        pull.cell: _block(results, execution, index, plan.objects[index], plan.sizes[index])
        for pull in program.pulls
        for index in [pull.cell.stripe]
    }
    for serve in program.serves:
        index = serve.cell.stripe
        member = plan.members[index]
        view = execution.views[member]
        cells.own(execution, execution.key(serve.cell), member, view, 0, len(view))
    for pull in program.pulls:
        index = pull.cell.stripe
        memory, whole = blocks[pull.cell], (0, plan.sizes[index])
        wanted = pull.parent, execution.key(pull.cell)
        execution.queue += _pulled(
            execution, cells, plan.objects[index], memory, whole, None, wanted
        )


# Makes the cells of the manager's collectives that copy objects: each copy becomes a replica here.
#
# Such a copy is an object that processes here may ask for meanwhile, so it is received into the
# block of that remote object, and not if it is here or on its way already.


class Replicating:
    """Receives objects as the blocks of remote objects."""

    def __init__(
        self,
        host: HostContext,
        cells: PlanCells,
        replicas: Replicas,
        filler: Filler,
        brought: Callable[[PlanState, int], None],
    ) -> None:
        """filler: what fills these remote objects. brought: called when another execution that was
        filling one has ended."""
        self.client = host.client
        self.store = host.store
        self.remote_objects = host.remote_objects
        self.cells = cells
        self.links = cells.links
        self.replicas = replicas
        self.filler = filler
        self.brought = brought

    def make(self, execution: PlanState, plan: ExecuteReduce) -> None:
        """Makes the cells and queues the pulls. Raises NotNow without free memory; a later call
        does not make the same cells again."""
        program = execution.program
        for cell in program.result:
            # An object that is already here is kept as a replica from now on.
            if cell.node == self.client.number:
                self.replicas.keep(plan.objects[cell.stripe], plan.sizes[cell.stripe])
        for serve in program.serves:
            key = execution.key(serve.cell)
            if key not in execution.known:
                execution.known.add(key)
                view = execution.views[plan.members[serve.cell.stripe]]
                self.cells.make(execution, key, view, 0, view.nbytes, True)
        for pull in program.pulls:
            cell = pull.cell
            key = execution.key(cell)
            if key in execution.known:
                continue
            if cell.node not in self.links.peers.by_number:
                # That node is gone, and a new plan follows. Until then the object is not on its
                # way, so that whether it is lost does not depend on this plan.
                execution.known.add(key)
                execution.waiting += 1
                continue
            object_id, nbytes = plan.objects[cell.stripe], plan.sizes[cell.stripe]
            oid = self.replicas.expect(object_id, nbytes, (cell.node,))
            remote = self.remote_objects.by_oid.get(oid)
            if remote is None:
                execution.known.add(key)
                self.replicas.tell(object_id, nbytes)
                continue
            if remote.payload:  # another execution is filling it
                execution.known.add(key)
                execution.waiting += 1
                remote.waiting.append(partial(self.brought, execution, oid))
                continue
            payload = self.store.lease(nbytes, NODE_SLOT)
            if payload is None:
                raise NotNow("what is gathered does not fit into the store beside what is in use")
            execution.known.add(key)
            remote.payload, remote.filler = payload, self.filler
            memory = self.client.memory(payload, nbytes)
            made = self.cells.make(execution, None, memory, 0, nbytes, False, remote.engine_buffer)
            execution.copies[made] = oid
            execution.pulls[made] = cell.node, key
            execution.queue.append(made)
            execution.missing.add(made)
