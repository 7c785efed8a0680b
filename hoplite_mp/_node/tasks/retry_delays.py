"""Delays between attempts to run a task (`options(retry_delay=)`).

A task that failed because a service is overloaded would fail again if it were retried immediately.
During its delay, a task is in the state WAITING, like a task whose arguments are missing: it
occupies no worker and no resources, is not in any queue, and can be cancelled immediately. The
submitter's node measures the delay, so the loss of another host does not affect it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import STATE

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.tasks.inbound_tasks import InboundTasks
    from hoplite_mp._node.tasks.resources import Resources
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._planner.resources import Demand

__all__ = ["RetryDelays"]


class RetryDelays:
    """The tasks of this host that are waiting for a retry."""

    def __init__(
        self, host: HostContext, workers: Workers, inbound_tasks: InboundTasks, resources: Resources
    ) -> None:
        self.loop = host.loop
        self.client = host.client
        self.tasks = host.tasks
        self.workers = workers
        self.inbound_tasks = inbound_tasks
        self.resources = resources
        # Task -> (time at which the delay ends, resources that the task needs then).
        self._by_oid: dict[int, tuple[float, Demand]] = {}

    def begin(self, oid: int) -> None:
        """Starts the delay of a task that will run again. Returns an inbound task to its host,
        where it waits."""
        if oid in self.inbound_tasks:
            self.inbound_tasks.try_again(oid)
            return
        pool = self.workers.pools.get(self.tasks.pool_of(oid))
        ends = pool is None or pool.closing or pool.broken  # the task will fail immediately
        pause = 0.0 if ends else self.tasks.retry_pause(oid)
        self._by_oid[oid] = self.loop.now() + pause, self.resources.take_back(oid)
        self.loop.call_later(pause, functools.partial(self._over, oid))

    def waiting(self) -> dict[int, float]:
        """The remaining seconds of each task whose delay is not over."""
        now = self.loop.now()
        return {
            oid: max(0.0, until - now)
            for oid, (until, _) in self._by_oid.items()
            if self.client.state(oid) == STATE["WAITING"]
        }

    def pool_forgotten(self, number: int) -> None:
        """Fails the tasks of a pool that is closed or broken."""
        for oid in [oid for oid in self._by_oid if self.tasks.pool_of(oid) == number]:
            self._over(oid)

    def _over(self, oid: int) -> None:
        entry = self._by_oid.pop(oid, None)
        if entry is None or self.client.state(oid) != STATE["WAITING"]:
            return  # the task was cancelled, its submitter has died, or its pool was closed
        demand = entry[1]
        workers = self.workers
        pool = workers.pools.get(self.tasks.pool_of(oid))
        if pool is None or pool.closing:
            workers.fail_closed(oid)
        elif pool.broken:
            workers.fail(oid, pool.broken, pool.setup_text, pool.host_lost)
        elif demand:
            self.resources.wait(oid, demand)
        else:
            pool.stuck_since = None  # the pool's workers can now run this task
            workers.announce(oid, workers.events.may_leave() and workers.is_bound(oid))
            self.client.wake_waiters(oid)  # a worker that is waiting for the task may run it itself
