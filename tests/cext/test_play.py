"""Virtual time in the compiled modules: what one run leaves behind must not reach the next one."""

from __future__ import annotations

import time

import pytest

from hoplite_mp import _tasks
from tests.support.shm_host import ShmHost


class Interrupted(Exception):
    """Raised where a simulated process sleeps."""


def sleep(address: int, ns: int) -> None:
    raise Interrupted


def test_what_was_raised_in_a_sleep_that_nobody_looked_at_ends_with_its_run() -> None:
    host = ShmHost()
    tasks = host.node_tasks
    board = _tasks.Board(tasks, 0)
    board.reset(2, 1)
    board.set_client(0, tasks.slot)
    board.set_masks(0b11, 0, True)
    _tasks.play(sleep, lambda address: None)
    try:
        _tasks.play_at(time.monotonic_ns())
        soon = time.monotonic_ns() + 10**9
        barrier = _tasks.CALL_KINDS.index("barrier")
        assert board.make(0, 0, barrier, 0, 0, 0, None, 0, 10**9, soon) == 0
        _tasks.play(sleep, lambda address: None)  # the next run
        assert not tasks.wait([], 1, 0, False)
        with pytest.raises(Interrupted):
            tasks.wait([], 1, soon, False)
    finally:
        _tasks.play(None, None)
        host.close()
