"""Makes the cells for plans that only copy objects.

Only bytes that no earlier plan has received are pulled. In collectives that the manager plans, the
copies become replicas, which processes on this host may request while the bytes are still arriving.
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
    from hoplite_mp._node.objects.remote_objects import Filler, RemoteObject
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._node.ports import Key
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["Filling"]


class Filling:
    """The cells and pulls of executions that only copy."""

    def __init__(
        self,
        host: HostContext,
        cells: PlanCells,
        replicas: Replicas,
        filler: Filler,
        brought: Callable[[PlanState, int], None],
    ) -> None:
        """filler: the component that fills replicas. brought: called when another execution that
        was filling a replica has ended."""
        self.client = host.client
        self.store = host.store
        self.results = host.results
        self.remote_objects = host.remote_objects
        self.cells = cells
        self.links = cells.links
        self.replicas = replicas
        self.filler = filler
        self.brought = brought

    def fill(self, execution: PlanState) -> None:
        """Makes all cells and queues the pulls. Raises NotNow if there is no memory yet; a later
        call then makes the missing cells. Afterwards `execution.blocks` contains the block of each
        arriving object that does not become a replica, by the member's index in the plan (0 in a
        Distribute, which has only one object)."""
        plan = execution.plan
        if isinstance(plan, Distribute):
            self._spread(execution, plan)
        elif execution.done is not None:
            self._gather(execution, plan)
        else:
            self._replicate(execution, plan)

    def _block(self, execution: PlanState, index: int, object_id: bytes, nbytes: int) -> Any:
        """Returns the memory of a new block, or of the block that an earlier plan began to fill."""
        if index not in execution.blocks:
            begun = execution.carryover.copies.pop(object_id, None)
            payload = self.results.lease(nbytes) if begun is None else begun.payload
            if payload is None:
                raise NotNow(
                    "the arriving object does not fit in the store beside the objects in use"
                )
            execution.blocks[index] = payload, nbytes if begun is None else begun.nbytes
            execution.arrived_before[object_id] = Ranges() if begun is None else begun.arrived
        return self.client.memory(*execution.blocks[index])

    def _pulled(
        self,
        execution: PlanState,
        object_id: bytes,
        memory: Any,
        stripe: tuple[int, int],
        served_key: Key | None,
        pull: tuple[int, Key],
    ) -> list[int]:
        """Makes and returns one cell for each missing range of a stripe. served_key: the key under
        which other nodes read the stripe, or None. If the only missing range extends to the end of
        the stripe, its cell covers the whole stripe, and other nodes read that cell. Otherwise they
        read a separate cell, which advances as the returned cells are filled."""
        cells, (begin, end) = self.cells, stripe
        arrived = execution.arrived_before[object_id]
        gaps = arrived.gaps(begin, end)
        if served_key and not (len(gaps) == 1 and gaps[0][1] == end):
            available = arrived.reach(begin, end)
            cell = cells.make(execution, served_key, memory, begin, end - begin, available)
            if gaps:
                execution.followed[cell] = begin, end
            served_key = None
        made = []
        for first, last in gaps:
            cell = cells.make(execution, served_key, memory, begin, last - begin, first - begin)
            execution.fills[cell] = object_id, begin, first
            execution.pulls[cell] = pull
            execution.missing.add(cell)
            made.append(cell)
        return made

    def _spread(self, execution: PlanState, plan: Distribute) -> None:
        program = execution.program
        memory: Any = None
        queued: dict[int, list[int]] = {}  # stripe -> its cells, in the order of the pulls
        if 0 not in execution.views:
            memory = self._block(execution, 0, plan.object, plan.nbytes)
            queued = {pull.cell.stripe: [] for pull in program.pulls}
        parents = {pull.cell.stripe: pull.parent for pull in program.pulls}
        served = {serve.cell.stripe for serve in program.serves}
        for index, stripe in enumerate(plan.stripes):
            begin = copy_offset(plan.nbytes, stripe.begin_share)
            end = copy_offset(plan.nbytes, stripe.end_share)
            key = (plan.operation, plan.epoch, index, 0)
            served_key = key if index in served else None
            if index in queued:
                pull = parents[index], key
                queued[index] = self._pulled(
                    execution, plan.object, memory, (begin, end), served_key, pull
                )
            elif served_key:
                self.cells.own(execution, served_key, 0, execution.views[0], begin, end - begin)
        execution.queue += chain.from_iterable(queued.values())

    def _gather(self, execution: PlanState, plan: ExecuteReduce) -> None:
        program = execution.program
        # Lease all blocks before making any cell. This method is called again if a lease fails, and
        # would otherwise make some cells twice.
        blocks = {
            pull.cell: self._block(execution, index, plan.objects[index], plan.sizes[index])
            for pull in program.pulls
            for index in [pull.cell.stripe]
        }
        for serve in program.serves:
            member = plan.members[serve.cell.stripe]
            view = execution.views[member]
            self.cells.own(execution, execution.key(serve.cell), member, view, 0, len(view))
        for pull in program.pulls:
            index = pull.cell.stripe
            memory, whole = blocks[pull.cell], (0, plan.sizes[index])
            wanted = pull.parent, execution.key(pull.cell)
            execution.queue += self._pulled(
                execution, plan.objects[index], memory, whole, None, wanted
            )

    # -- replicas ------------------------------------------------------------------------------

    def claim(
        self,
        execution: PlanState,
        object_id: bytes,
        nbytes: int,
        holders: tuple[int, ...],
        filler: Filler,
        brought: Callable[[PlanState, int], None],
    ) -> tuple[int, RemoteObject | None]:
        """Returns (the id of the object's header, the remote object whose new block the execution
        must fill). The remote object is None if the object is already here, or if another execution
        is filling its block. In the latter case `execution.waiting` is incremented. Raises NotNow
        if there is no memory yet."""
        oid = self.replicas.expect(object_id, nbytes, holders)
        remote = self.remote_objects.by_oid.get(oid)
        if remote is None:
            self.replicas.tell(object_id, nbytes)
        elif remote.payload:
            execution.waiting += 1
            remote.waiting.append(partial(brought, execution, oid))
            remote = None
        else:
            payload = self.store.lease(nbytes, NODE_SLOT)
            if payload is None:
                raise NotNow("the copied object does not fit in the store beside those in use")
            remote.payload, remote.filler = payload, filler
        return oid, remote

    def _replicate(self, execution: PlanState, plan: ExecuteReduce) -> None:
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
                # The node is gone, and a new plan will follow. Do not claim the object: the new
                # plan decides whether it is lost.
                execution.known.add(key)
                execution.waiting += 1
                continue
            object_id, nbytes = plan.objects[cell.stripe], plan.sizes[cell.stripe]
            oid, remote = self.claim(
                execution, object_id, nbytes, (cell.node,), self.filler, self.brought
            )
            execution.known.add(key)
            if remote is None:
                continue
            memory = self.client.memory(remote.payload, nbytes)
            made = self.cells.make(execution, None, memory, 0, nbytes, False, remote.engine_buffer)
            execution.copies[made] = oid
            execution.pulls[made] = cell.node, key
            execution.queue.append(made)
            execution.missing.add(made)
