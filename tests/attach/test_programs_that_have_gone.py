"""What programs that have gone leave in a node that serves one after another: nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoplite_mp._node.tasks.worker_recycling import POLL_S
from hoplite_mp._protocol.local import BeginWorkerBroadcast
from tests.support.clusters import PATIENCE_S
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from tests.support.clusters import LoopbackCluster

PROGRAM = """
globals()["big"] = np.full(1_000_000, 3)
def remember(_):
    before = getattr(sys, "remembered", 0)
    sys.remembered = before + int(big[7])
    time.sleep(0.05)
    return os.getpid(), before
def nested(n):
    return hoplite_mp.current().submit(remember, n).result()
found = [f.result() for f in [c.submit(nested, i) for i in range(8)]]
print(*{pid for pid, _ in found}, flush=True)
assert min(before for _, before in found) == 0
"""


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def run(up: LoopbackCluster) -> set[int]:
    """Plays the program; returns the processes in which its tasks were."""
    driver = up.driver(PROGRAM)
    out, _ = driver.communicate(timeout=PATIENCE_S)
    assert driver.returncode == 0
    served = {int(pid) for pid in out.split()}
    assert served
    return served


def gone(pids: set[int]) -> None:
    eventually(lambda: not any(map(is_there, pids)), "a worker of a program that has gone is left")


def test_their_workers_are_replaced(up: LoopbackCluster) -> None:
    """These have the globals of its functions, and what its tasks have set."""
    with up.attach() as c:
        mine = c.put(b"x" * 100_000)
        gone(run(up))  # the first one makes what every node has
        used, objects = c.stats()["bytes_used"], c.stats()["objects"]
        for _ in range(3):
            gone(run(up))
        eventually(lambda: c.stats()["objects"] <= objects, "objects of its functions stay")
        eventually(
            lambda: c.stats()["bytes_used"] <= used + (2 << 20), "memory of its globals stays"
        )
        assert c.get(mine) == b"x" * 100_000
        assert c.stats()["workers_lost"] == 0


def test_a_worker_that_has_served_a_program_that_is_there_stays(up: LoopbackCluster) -> None:
    """What the tasks of that program have set is still set, as long as it is there."""
    with up.attach() as c:
        c.run(setattr, os, "was_here", True)
        run(up)
        time.sleep(3 * POLL_S)
        assert all(c.run(hasattr, os, "was_here").values())
        served = set(c.run(os.getpid).values())
    gone(served)


def test_a_round_that_has_begun_counts_on_them(up: LoopbackCluster) -> None:
    """A new program's call that runs once in every worker, while those of the last one end."""
    run(up)
    with up.attach() as c:
        channel = c._runtime.channel
        tell = channel.tell

        def slowly(what: Any) -> Any:
            if isinstance(what, BeginWorkerBroadcast):
                time.sleep(3 * POLL_S)
            return tell(what)

        channel.tell = slowly  # type: ignore[method-assign]
        # On a busy machine one that is being replaced may still be there, beside its successor,
        # or is replaced only now.
        marked = set(c.run(mark).values())
        assert len(marked) >= 2
        assert all(was_here for pid, was_here in c.run(look).values() if pid in marked)


def mark() -> int:
    os.was_here = True  # type: ignore[attr-defined]
    return os.getpid()


def look() -> tuple[int, bool]:
    return os.getpid(), hasattr(os, "was_here")
