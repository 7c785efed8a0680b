"""The end of a process of this host: what every room does for what it leaves behind.

Why it exists: a worker that has ended and a driver that has left are the same to most rooms, and
the order in which they act is one: what the process has already given away is held before its
objects and tasks are swept, and the manager hears of it after that.
It must never know: why the process has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import ClientLost

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.node.groups.groups import Groups
    from hoplite_mp.node.inspect.recording import Recording
    from hoplite_mp.node.objects.context import HostContext
    from hoplite_mp.node.requests import Requests
    from hoplite_mp.node.tasks.pools import WorkerInfo
    from hoplite_mp.node.tasks.sweeper import Sweeper

__all__ = ["ClientEnds"]


class ClientEnds:
    """Of one node."""

    def __init__(
        self,
        host: HostContext,
        groups: Groups,
        recording: Recording,
        sweeper: Sweeper,
        requests: Requests,
        forget_line: Callable[[int], None],
    ) -> None:
        self.client = host.client
        self.send_manager = host.send_manager
        self.groups = groups
        self.recording = recording
        self.sweeper = sweeper
        self.requests = requests
        self.forget_line = forget_line

    def settle(
        self, slot: int, worker: WorkerInfo | None, code: int, reads_on: bool = False
    ) -> list[int]:
        """Everything of its that others need is kept, the rest goes. worker: if it was one, which
        has ended with this code. reads_on: it has left, and still reads memory. Returns the tasks
        that are to run again."""
        generation = self.client.client_info(slot)["generation"]
        self.forget_line(slot)
        self.groups.hold_committed(slot)
        self.recording.exited(slot, worker)
        again = self.sweeper.sweep(slot, worker, code, reads_on)
        self.groups.forget_client(slot)
        self.send_manager(ClientLost(self.client.number, slot, generation))
        self.requests.forget_client(slot)
        return again

    def settle_again(self, slot: int) -> None:
        """One that had left reads nothing any more."""
        self.groups.hold_committed(slot)
        self.sweeper.sweep(slot, None, 0, False)
