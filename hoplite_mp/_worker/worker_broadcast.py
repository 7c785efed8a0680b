"""A worker's part in rounds (`Cluster.run`): between two tasks it runs its task of each round.

It must never know: which process has called the round, how many other workers take part.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from hoplite_mp._protocol.worker_broadcast import TakeRound

if TYPE_CHECKING:
    from hoplite_mp._worker.ports import OfWorker

__all__ = ["offer", "take_part"]

COMMON_POOL = 0


def offer(worker: OfWorker) -> None:
    """Lets this worker take part in rounds while a task of its own waits for a round that it has
    called, because otherwise two tasks that call rounds would wait for each other for ever."""
    if worker.pool != COMMON_POOL:
        return

    def take_part_now() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "run() in an async task, or in a thread of a task: this worker can take part only "
                "when that task has ended, and the task would wait for it; call run() from a plain "
                "task's own thread, from an actor, or from the program"
            )
        if worker.beside.slots.called:
            take_part(worker)

    worker.runtime.take_part = take_part_now


def take_part(worker: OfWorker) -> None:
    """Asks the node for this worker's tasks of rounds, and runs them."""
    for oid in worker.runtime.channel.call(TakeRound()).value:
        if worker.tasks.claim(oid):
            worker.run(oid)
            worker.keep_house(True)
