"""The locks in a process, their order, and the start of threads.

All locks are created here, with a name in `ORDER`. A thread that holds a lock acquires only locks
below it in this table, so threads cannot deadlock. docs/architecture.md lists what each lock
protects. If HOPLITE_MP_DEBUG_LOCKS is set, `lockdep` checks all locks; otherwise these functions
return plain `threading` locks.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING

from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._common.lockdep import Checker

__all__ = [
    "DEBUG_VARIABLE",
    "ORDER",
    "calls_user_code",
    "checker",
    "condition",
    "lock",
    "rlock",
    "sends",
    "starting_thread",
    "waits",
]


# If the value is "" or "0", locks are not checked. If it is "1", findings are logged. If it is a
# directory, findings are also written to files there.
DEBUG_VARIABLE = "HOPLITE_MP_DEBUG_LOCKS"
# For each lock name, from the outermost to the innermost: whether the holder may wait for the node
# or for an object. Such a wait, and therefore a wait for the lock, may take long.
ORDER: dict[str, bool] = {
    # a cluster's start and end
    "joblib.process": True,
    "joblib.pools": True,
    "engine.entering": True,
    "engine.changed": False,
    "engine.members": False,
    "ray.leader": False,
    "cluster.end": True,
    "cluster.connecting": False,
    # a Group's members
    "torch.turn": True,
    "torch.counting": False,
    "torch.work": False,
    "group.receives": True,
    "group.first_call": False,
    "group.asking": True,
    "group.inbox": False,
    # calls by users
    "stream.reading": True,
    "sync.table": False,
    "sync.first_life": False,
    "sync.life": True,
    "actors.numbered_calls": True,
    "serial.globals": False,
    "serial.hooks": False,
    "client.written_pages": True,
    # completions
    "client.completions": False,
    "client.waits": False,
    "client.future": False,
    "client.making_conditions": False,
    "client.spmd": False,
    "client.collector": False,
    "client.own_calls": False,
    "client.blocked": False,
    "client.runtimes": False,
    "worker.deadlines": False,
    # held while a thread is waiting for a reply, so that requests are sent one at a time
    "client.channel": True,
    # node, manager, commands
    "node.control_channel": False,
    "node.forward": False,
    "manager.packed": False,
    "mdns.names": False,
}


def lock(name: str) -> threading.Lock:
    """A lock."""
    return threading.Lock() if checker is None else checker.lock(name)


def rlock(name: str) -> threading.RLock:
    """A lock that its holder may acquire again."""
    return threading.RLock() if checker is None else checker.rlock(name)


def condition(name: str) -> threading.Condition:
    """A condition with its own lock, which the holder may acquire again."""
    return threading.Condition() if checker is None else checker.condition(name)


def _nothing(_: str) -> None:
    """Replaces a check that is disabled."""


checker: Checker | None = None
# `sends` is called before a message without a reply is sent, with the name of the lock under which
# replies are handled. `waits` is called before a thread waits for the node or for an object, and
# `calls_user_code` before a user's function is called.
sends: Callable[[str], None] = _nothing
waits: Callable[[str], None] = _nothing
calls_user_code: Callable[[str], None] = _nothing
if os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0"):
    from hoplite_mp._common.lockdep import Checker

    checker = Checker(ORDER, os.environ[DEBUG_VARIABLE])
    sends, waits, calls_user_code = checker.sends, checker.waits, checker.calls_user_code


# The error if one of the library's threads cannot be started.


NONE_LEFT = "can't start new thread"  # message of CPython's RuntimeError


@contextlib.contextmanager
def starting_thread(purpose: str) -> Iterator[None]:
    """A context manager around the start of a thread. Raises ConfigError if the system refuses to
    start the thread. purpose: a verb phrase for the message, such as "reads replies"."""
    try:
        yield
    except RuntimeError as error:
        if NONE_LEFT not in str(error):
            raise
        raise ConfigError(
            f"cannot start the thread that {purpose}: this user's limit of processes and threads "
            "is reached, or memory is short; raise the limit (ulimit -u, or the control group), or "
            "start fewer workers"
        ) from error
