"""Bounded allreduces in the simulation: their threads and locks are those of the run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from hoplite_mp._group import bounded
from hoplite_mp._simulation.virtual import processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._simulation.workloads.workload import Workload

__all__ = ["simulated_threads", "start_threads_in"]


@contextlib.contextmanager
def simulated_threads() -> Iterator[None]:
    """Surrounds a run with collectors, whose `begin` calls `start_threads_in`."""
    client = (*processes.CLIENT, "hoplite_mp._group.")
    threads = SimpleNamespace(current_thread=lambda: None)
    with (
        mock.patch.object(processes, "CLIENT", client),
        mock.patch.object(bounded, "threading", threads),
    ):
        yield


def start_threads_in(work: Workload) -> None:
    """Threads that members start belong to this run from now on."""
    bounded.threading.Thread = lambda target, **_: _thread_of(work, target)  # type: ignore[attr-defined]


def _thread_of(work: Workload, target: Callable[[], None]) -> Any:
    """In place of threading.Thread: a thread of the running simulated process."""
    main = work.world.processes.running
    assert main is not None
    made: list[Any] = []

    def start() -> None:
        made.append(work.world.hosts[main.host].run(f"rounds of {main.name}", target))
        main.add_thread(made[0])

    def join(seconds: float) -> None:
        running = work.world.processes.running
        assert running is not None
        running.wait(None, seconds)

    alive = lambda: bool(made) and made[0].alive and not made[0]._over  # noqa: E731
    return SimpleNamespace(start=start, join=join, is_alive=alive)
