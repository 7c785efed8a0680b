"""Replaces workers once all drivers that they have served have left.

A function is sent with the globals of its program, and a task's imports and settings remain in its
worker for the next task. A node that serves one program after another would therefore keep data of
each program indefinitely, in the workers' memory and in the store. To avoid this, a worker of the
common pool is replaced when it is idle and all drivers whose tasks it has run are gone. A worker
that has also served a remaining driver is kept, because that driver may rely on settings made by
its tasks. Marks in a worker's output show which drivers the worker has served.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._protocol.output import same_host

if TYPE_CHECKING:
    from hoplite_mp._node.objects.context import HostContext
    from hoplite_mp._node.output.output import Output
    from hoplite_mp._node.tasks.worker_broadcast import WorkerBroadcasts
    from hoplite_mp._node.tasks.workers import Workers
    from hoplite_mp._protocol.messages import Member

__all__ = ["WorkerRecycling"]

COMMON_POOL = 0
# Interval of checks while a worker to be replaced is busy or marks may be unread. Higher: memory
# used by finished programs is freed later.
POLL_S = 0.5
# The number of checks, after a driver has left, in which a mark that names it may still be found.
POLLS_MAX = 20


class WorkerRecycling:
    """Tracks the drivers that have left and may have been served by a worker here."""

    def __init__(
        self,
        host: HostContext,
        output: Output,
        workers: Workers,
        worker_broadcasts: WorkerBroadcasts,
    ) -> None:
        self.loop = host.loop
        self.roster = host.roster
        self.client = host.client
        self.output = output
        self.workers = workers
        self.worker_broadcasts = worker_broadcasts
        self._gone: dict[int, int] = {}  # name of a driver -> remaining checks
        self._hosts: dict[int, int] = {}  # id of a host whose drivers are gone -> remaining checks
        self._check_pending = False

    def driver_ended(self, name: int) -> None:
        """Records that the attached driver with that name has left."""
        self._gone[name] = POLLS_MAX
        self._check_later()

    def peer_lost(self, member: Member) -> None:
        """Records the loss of a host with all its drivers."""
        self._hosts[member.host_id] = POLLS_MAX
        self._check_later()

    def _check_later(self) -> None:
        if not self._check_pending:
            self._check_pending = True
            self.loop.call_later(POLL_S, self._check)

    def _check(self) -> None:
        for host_id in self.roster.by_host_id:  # a lost host may have rejoined
            self._hosts.pop(host_id, None)
        busy = False
        self.output.read_marks()
        served = self.output.served()  # by slot
        for slot, names in served.items():
            worker = self.workers.all.get(slot)
            if worker is None or worker.pool != COMMON_POOL or worker.retiring:
                continue
            if not all(map(self._is_gone, names)):
                continue
            running = self.client.client_info(slot)["running"]
            if running or self.worker_broadcasts.counts_on(slot) or self.workers.pauses():
                busy = True
            else:
                self.workers.replace(worker)
        all_served = {name for names in served.values() for name in names}
        self._gone = {
            name: max(0, left - 1)
            for name, left in self._gone.items()
            if left or name in all_served
        }
        self._hosts = {
            host_id: max(0, left - 1)
            for host_id, left in self._hosts.items()
            if left or any(same_host(name, host_id) for name in all_served)
        }
        self._check_pending = False
        if busy or any(self._gone.values()) or any(self._hosts.values()):
            self._check_later()

    def _is_gone(self, name: int) -> bool:
        return name in self._gone or any(same_host(name, host_id) for host_id in self._hosts)
