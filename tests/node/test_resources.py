"""Whether a task that is given resources of this host finds a worker here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._common.object_states import STATE
from hoplite_mp._node.tasks.resources import AHEAD_TASKS, _Turn

OWN, OTHER = 77, 78


@pytest.mark.parametrize("idle", [0, 1, 3])
def test_tasks_that_wait_for_a_worker_here_are_counted(idle: int) -> None:
    """Beside what runs here, and what waits elsewhere. A few may wait, for the next worker that is
    free; more had better go to another host."""
    for waits in range(idle + AHEAD_TASKS + 2):
        about = [(OWN, "QUEUED")] * waits + [
            (OWN, "CLAIMED"),
            (OTHER, "QUEUED"),
            (OTHER, "CLAIMED"),
        ]
        resources: Any = SimpleNamespace(
            client=SimpleNamespace(
                host_id=OWN, state=lambda oid, about=about: STATE[about[oid][1]]
            ),
            workers=SimpleNamespace(pools={}),
            held={oid: SimpleNamespace(host_id=host_id) for oid, (host_id, _) in enumerate(about)},
            tasks=SimpleNamespace(idle=lambda pool: idle),
        )
        wanted = None if waits >= idle + AHEAD_TASKS else waits < idle
        assert _Turn(resources)._has_free_worker(OWN) is wanted
