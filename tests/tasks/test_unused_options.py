"""Options and arguments that would be ignored raise, and say where they belong."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp._api.executor import Options
from hoplite_mp._client.option_checks import UNUSED
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster

VALUES: dict[str, Any] = {
    "retries": 1,
    "timeout": 60,
    "copy": True,
    "name": "named",
    "restarts": 1,
    "checkpoint": 1,
    "detached": True,
    "get_if_exists": True,
    "concurrency": 2,
    "buffersize": 3,
    "retry_exceptions": OSError,
    "retry_delay": 0.5,
    "env": {"A": "b"},
    "priority": 1,
}
CALLS: dict[str, Callable[[Cluster], Any]] = {
    "submit": lambda c: c.submit(abs, -1).result(PATIENCE_S),
    "map": lambda c: list(c.map(abs, [-1])),
    "stream": lambda c: list(c.stream(iter, [1])),
    "run": lambda c: c.run(abs, -1),
    "executor": lambda c: c.executor(1).shutdown(),
    "spmd": lambda c: c.spmd(abs, 1)[0].result(PATIENCE_S),
    "actor": lambda c: hoplite_mp.Actor.close(c.actor(list)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("option", VALUES)
def test_option_without_effect_on_a_call_raises(cluster: Cluster, call: str, option: str) -> None:
    view = cluster.options(**{option: VALUES[option]})
    refused = option in UNUSED[call] or (call, option) == ("stream", "retry_exceptions")
    if not refused:
        CALLS[call](view)
        return
    with pytest.raises(ValueError, match=f"{option}=.*{call}\\(\\)"):
        CALLS[call](view)


def test_every_option_is_in_the_table() -> None:
    given = {*VALUES, "node", "resources"}
    assert {name for name in Options.__dataclass_fields__ if not name.startswith("_")} == given


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, "1", True, b"x"])
def test_run_refuses_invalid_timeouts(cluster: Cluster, timeout: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout="):
        cluster.run(abs, -1, timeout=timeout)


WAITS: dict[str, Callable[[Cluster, Any], Any]] = {
    "result": lambda c, t: c.submit(abs, -1).result(t),
    "exception": lambda c, t: c.submit(abs, -1).exception(t),
    "get": lambda c, t: c.get(c.put(1), timeout=t),
    "wait": lambda c, t: c.wait(c.put(1), timeout=t),
    "map": lambda c, t: c.map(abs, [1], timeout=t),
    "as_completed": lambda c, t: hoplite_mp.as_completed([c.submit(abs, -1)], timeout=t),
    "options": lambda c, t: c.options(timeout=t),
    "queue": lambda c, t: hoplite_mp.Queue().get(timeout=t),
    "lock": lambda c, t: hoplite_mp.Lock().acquire(timeout=t),
    "event": lambda c, t: hoplite_mp.Event().wait(timeout=t),
    "group": lambda c, t: c.group("g", 1, 0, timeout=t),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("timeout", [math.nan, "1", True, [1]])
def test_timeout_that_is_no_number_of_seconds_raises(
    cluster: Cluster, wait: str, timeout: Any
) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout"):
        WAITS[wait](cluster, timeout)


def test_named_objects_refuse_other_parameters(cluster: Cluster) -> None:
    jobs: Any = hoplite_mp.Queue(5, name="jobs")
    assert hoplite_mp.Queue(name="jobs") == jobs
    assert hoplite_mp.Queue(maxsize=None, name="jobs") == jobs
    assert hoplite_mp.Queue(maxsize=5, name="jobs") == jobs
    for other in (0, 4, -1):
        with pytest.raises(ValueError, match="'jobs' was created with maxsize=5"):
            hoplite_mp.Queue(maxsize=other, name="jobs")
    endless: Any = hoplite_mp.Queue(name="endless")
    assert hoplite_mp.Queue(0, name="endless") == endless
    with pytest.raises(ValueError, match="was created with maxsize=0"):
        hoplite_mp.Queue(1, name="endless")
    permits = hoplite_mp.Semaphore(3, name="permits")
    permits.acquire()
    assert hoplite_mp.Semaphore(name="permits") == permits
    assert hoplite_mp.Semaphore(3, name="permits") == permits
    with pytest.raises(ValueError, match="'permits' was created with value=3"):
        hoplite_mp.Semaphore(2, name="permits")
