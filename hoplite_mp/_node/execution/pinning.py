"""Pins the members of a plan that are on this host, so that they stay in memory during the plan.

A member is an object, which may have to be brought back from disk first, or a block that a member
of a Group is still writing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.execution.local_reduce import SourcesGone
from hoplite_mp._node.execution.plan_state import NotNow
from hoplite_mp._protocol.fields import FOLDING
from hoplite_mp._protocol.messages import Distribute

if TYPE_CHECKING:
    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.store.growing_block import GrowingBlocks

__all__ = ["Pinning"]


class Pinning:
    """Pins for all executions of this node."""

    def __init__(self, host: HostContext, streaming_sources: GrowingBlocks) -> None:
        self.config = host.config
        self.loop = host.loop
        self.client = host.client
        self.imports = host.imports
        self.results = host.results
        self.remote_objects = host.remote_objects
        self.streaming_sources = streaming_sources

    def pin(self, execution: PlanState) -> None:
        """Fills `execution.views`. Raises NotNow if there is no room yet, SourcesGone."""
        plan = execution.plan
        gone = []
        folds = not isinstance(plan, Distribute) and plan.kind in FOLDING  # an error can be copied
        if isinstance(plan, Distribute):
            at = {0: plan.object}
            wanted = [0] if self.client.number in plan.sources else []
        else:
            at = dict(zip(plan.members, plan.objects, strict=True))
            wanted = list(dict.fromkeys(index for _, index in execution.program.given))
        for index in wanted:
            if index in execution.views:
                continue
            source = self.streaming_sources.get(at[index])
            if source is not None:
                execution.views[index] = self.client.memory(source.payload, source.nbytes)
                execution.streaming[index] = source
                source.users += 1
                continue
            oid = self.imports.local(at[index])
            got = self.results.pin(oid) if oid else STATE["FREE"]
            if got is None:
                # It is being fetched from another host, and the fetch has a deadline of its own.
                if oid in self.remote_objects:
                    execution.until = self.loop.now() + self.config.put_wait_s
                raise NotNow(f"source {index} does not fit into the store beside what is in use")
            if isinstance(got, int) or (folds and self.results.is_gone(got)):
                gone.append(index)
            else:
                execution.views[index] = got
        if gone:
            raise SourcesGone(tuple(sorted(gone)))
