"""Tasks of this host whose end the manager asks for, because members of a Group wait for them.

Why it exists: whether a task is over or will be tried again, wherever it runs, only that node knows
from whose host it was submitted.
It must never know: which Group, who waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hoplite_mp import ids
from hoplite_mp.protocol.messages import GroupTasksOver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp import _shm, _tasks
    from hoplite_mp.protocol.messages import NodeToManager

__all__ = ["GroupTasks"]


class Above(Protocol):
    """What rooms above this one know, or must hear."""

    def runs_again(self, oid: int) -> bool:
        """Is that task run again, because its result was lost?"""


class GroupTasks:
    """Those that are not over yet; few, so all are looked at in each turn."""

    def __init__(
        self,
        client: _shm.NodeClient,
        tasks: _tasks.Tasks,
        send: Callable[[NodeToManager], None],
        node: Callable[[], int],
        above: Above,
    ) -> None:
        """node: this node's number."""
        self.client = client
        self.tasks = tasks
        self.send = send
        self.node = node
        self.above = above
        self.watched: dict[bytes, tuple[int, list[int]]] = {}  # task -> its header, where we park

    def ask(self, tasks: Iterable[bytes]) -> None:
        """The manager is told when each of them is over; of those that are at once."""
        over = []
        for task in tasks:
            home, oid = ids.unpack_id(task)
            if home != self.client.home or self._is_over(oid):
                over.append(task)
            elif task not in self.watched:
                # Who finishes it wakes this process, which looks before it sleeps.
                self.watched[task] = oid, self.tasks.park([oid])
        if over:
            self.send(GroupTasksOver(self.node(), tuple(over)))
        self.look()

    def look(self) -> None:
        """Is any of them over?"""
        if not self.watched:
            return
        over = [task for task, (oid, _) in self.watched.items() if self._is_over(oid)]
        for task in over:
            self.tasks.unpark(self.watched.pop(task)[1])
        if over:
            self.send(GroupTasksOver(self.node(), tuple(over)))

    def _is_over(self, oid: int) -> bool:
        return self.tasks.done(oid) and not self.above.runs_again(oid)
