"""The public face in a worker is executed when a task first asks for one of its names."""

from __future__ import annotations

from typing import Any

import hoplite_mp


def fresh_worker(function: Any) -> Any:
    """The function travels by value, so nothing but itself asks for the face."""
    with hoplite_mp.Cluster(1, memory="64MiB") as c:
        return c.submit(function).result(30)


def test_a_first_use_that_is_interrupted_is_made_up_for() -> None:
    """A task is cancelled by force in the middle of it: the next task finds the face whole."""

    def task() -> Any:
        import sys

        import hoplite_mp

        def interrupt(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code.co_filename.endswith("hoplite_mp/_api/cluster.py"):
                raise KeyboardInterrupt

        sys.settrace(interrupt)
        try:
            hoplite_mp.current()
        except KeyboardInterrupt:
            return hoplite_mp.current().submit(abs, -3).result()
        finally:
            sys.settrace(None)
        return "it was not interrupted"

    assert fresh_worker(task) == 3


def test_threads_that_ask_for_it_at_once() -> None:
    def task() -> Any:
        import threading
        from concurrent.futures import ThreadPoolExecutor

        import hoplite_mp

        together = threading.Barrier(8)

        def ask() -> bool:
            together.wait()
            return callable(hoplite_mp.current)

        with ThreadPoolExecutor(8) as threads:
            return all([one.result() for one in [threads.submit(ask) for _ in range(8)]])

    assert fresh_worker(task)
