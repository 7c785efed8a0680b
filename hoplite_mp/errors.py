"""Every error that hoplite_mp raises itself, and whose doing each one is.

Each class joins the domain (`HopliteError`) with the builtin that a caller would catch anyway, so
`except TimeoutError` works without knowing this module. An exception raised by a task is none of
these: it keeps its own type. All of them travel between processes: they pickle with their args.
Those of lost workers and hosts are made at their first use (`LOST`), so name them as attributes of
this module, `errors.WorkerLostError`, where they are raised or caught, and never import them.

What a message must say: what happened, where, how much, and what to do about it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = [
    "ActorLostError",
    "AuthError",
    "ClosedError",
    "ConfigError",
    "HopliteError",
    "HopliteTimeoutError",
    "ManagerLostError",
    "NodeLostError",
    "ObjectLostError",
    "PeerLostError",
    "ProtocolError",
    "ReduceError",
    "StoreFullError",
    "TaskError",
    "WorkerLostError",
]


class HopliteError(Exception):
    """Base of all errors of this library; catch it to catch them all."""


class ClosedError(HopliteError, RuntimeError):
    """The cluster, executor or group was closed before this call, or a fork left it behind.

    Your doing: keep the `with` block open for as long as its objects are used.
    """


class ConfigError(HopliteError, ValueError):
    """A limit has a value that cannot work; the message names the field and what is allowed.

    Your doing, in an argument or in the environment.
    """


class TaskError(HopliteError, RuntimeError):
    """A task raised an exception that could not be pickled; this one carries its text instead.

    The task's doing. An exception that pickles arrives as itself.
    """


class ObjectLostError(HopliteError, LookupError):
    """The object is gone: deleted, or no living process holds its bytes.

    Yours if you deleted it, otherwise the world's: whoever held it died.
    """


class PeerLostError(HopliteError, ConnectionError):
    """A member of a group died in a call that cannot do without it.

    The world's doing: it was the root, or the group is strict.
    """


class ManagerLostError(HopliteError, ConnectionError):
    """The manager does not answer: nobody is there, or it died.

    The world's doing; check the address and whether the cluster still runs.
    """


class StoreFullError(HopliteError, MemoryError):
    """The store had no room for the bytes until the deadline of the put.

    Yours to balance: free arrays and refs, or raise the limit.
    """


class HopliteTimeoutError(HopliteError, TimeoutError):
    """What was waited for did not happen within the timeout that you gave.

    Nobody's fault: what was waited for goes on and may be waited for again.
    """


class ReduceError(HopliteError, RuntimeError):
    """Too few sources of a collective succeeded; `__cause__` is the first failure.

    The doing of the tasks that made the sources.
    """


class ProtocolError(HopliteError, ConnectionError):
    """The other side of a connection sent what it must not send.

    The peer's doing: another version, or something that is no hoplite_mp at all.
    """


class AuthError(HopliteError, PermissionError):
    """The token is wrong or missing.

    Your doing: give every process of the cluster the same token.
    """


if TYPE_CHECKING:
    from concurrent.futures.process import BrokenProcessPool

    class WorkerLostError(HopliteError, BrokenProcessPool): ...

    class ActorLostError(WorkerLostError): ...

    class NodeLostError(WorkerLostError): ...


# Name, base and docstring of the errors that `except BrokenProcessPool` catches. That class lives
# in concurrent.futures.process, whose import costs 9 to 19 ms, which most programs never need.
LOST = {
    "WorkerLostError": (
        "",
        """A worker died while it ran the task, and the task's retries are used up.

    Caught by `except BrokenProcessPool`, too; but the pool goes on, with another worker. The
    world's doing (a kill, memory running out) or the task's (a crash in compiled code).
    """,
    ),
    "ActorLostError": (
        "WorkerLostError",
        """The actor's process has ended, and its state with it; or it was closed, or killed.

    The world's doing, or the class's own (a crash in compiled code). `options(restarts=)` begins
    it anew.
    """,
    ),
    "NodeLostError": (
        "WorkerLostError",
        """A whole node is gone, with its store and its workers.

    The world's doing: the host, its network or its node process failed.
    """,
    ),
}


def _make_lost() -> dict[str, type[HopliteError]]:
    try:
        from concurrent.futures.process import BrokenProcessPool as Broken
    except (ImportError, OSError):
        # No descriptor is left, or the interpreter is ending; what was lost must be told all the
        # same. Other processes find the class by its name, and have their own.
        from concurrent.futures import BrokenExecutor as Broken  # type: ignore[assignment]

    made: dict[str, type[HopliteError]] = {}
    for name, (base, text) in LOST.items():
        bases = (made[base],) if base else (HopliteError, Broken)
        made[name] = type(name, bases, {"__module__": "hoplite_mp", "__doc__": text})
    return made


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in LOST:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals().setdefault("_lost", _make_lost())  # of two threads one makes them
        globals().update(found)
        return found[name]


for _name in set(__all__) - set(LOST):
    # Tracebacks and pickles name the public place, `hoplite_mp.StoreFullError`.
    globals()[_name].__module__ = "hoplite_mp"
