"""Makes the cells of the manager's collectives that copy objects: each copy becomes a replica here.

Such a copy is an object that processes here may ask for meanwhile, so it is received into the block
of that remote object, and not if it is here or on its way already.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.execution.plan_state import NotNow

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.execution.plan_cells import PlanCells
    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.objects.remote_objects import Filler
    from hoplite_mp._node.objects.replicas import Replicas
    from hoplite_mp._protocol.messages import ExecuteReduce

__all__ = ["Replicating"]


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
        """Makes the cells and queues the pulls. Raises NotNow if there is no room yet; what it has
        made is not made again when it is called once more."""
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
