"""What becomes of a task whose worker has died, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _serialize, _tasks
from hoplite_mp._node.tasks.worker_pools import WorkerInfo
from hoplite_mp.errors import HopliteTimeoutError, WorkerLostError
from tests.support.shm_host import KIND_TASK, POOL, STATE, ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


@pytest.mark.parametrize("timed_out", [True, False])
@pytest.mark.parametrize("retries", [0, 1])
def test_task_killed_by_its_timeout_is_not_retried(
    host: ShmHost, timed_out: bool, retries: int
) -> None:
    """And names its limit. Another death of its worker spends a try."""
    owner, worker = host.client(), host.client()
    tasks = _tasks.Tasks(owner)
    oid = owner.new(KIND_TASK, STATE["WAITING"], 0, POOL)
    hold = owner.hold(oid, False)
    queue = tasks.open_queue(POOL)
    tasks.submit(oid, 0, b"", 0, retries, 1_500_000_000, 0, b"f", queue, True)
    assert _tasks.Tasks(worker).next(POOL, 0) == oid
    verdict = "timeout" if timed_out else ""
    info = WorkerInfo(worker.slot, POOL, pid=1, verdict=verdict, verdict_oid=oid)
    again = host.sweeper.sweep(worker.slot, info, -9)
    if retries and not timed_out:
        assert again == [oid]
        assert owner.state(oid) == STATE["QUEUED"]
        return
    assert again == []
    got: Any = owner.view(oid)
    error = _serialize.decode_error(memoryview(got), lambda i: None)  # type: ignore[arg-type,return-value]
    if timed_out:
        assert isinstance(error, HopliteTimeoutError)
        assert "f() ran longer than its timeout of 1.5 s on worker" in str(error)
    else:
        assert isinstance(error, WorkerLostError)
        assert "while running f(); tried 1 time." in str(error)
    del hold
