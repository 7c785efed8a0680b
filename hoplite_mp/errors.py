"""Every error that hoplite_mp raises itself, and whose doing each one is.

Each class joins the domain (`HopliteError`) with the builtin that a caller would catch anyway, so
`except TimeoutError` works without knowing this module. An exception raised by a task is none of
these: it keeps its own type. All of them travel between processes: they pickle with their args.

What a message must say: what happened, where, how much, and what to do about it.
"""

from __future__ import annotations

from concurrent.futures import BrokenExecutor

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


class WorkerLostError(HopliteError, BrokenExecutor):
    """A worker died while it ran the task, and the task's retries are used up.

    The world's doing (a kill, memory running out) or the task's (a crash in compiled code).
    """


class ActorLostError(WorkerLostError):
    """The actor's process has ended, and its state with it; or it was closed, or killed.

    The world's doing, or the class's own (a crash in compiled code). `options(restarts=)` begins
    it anew, `options(checkpoint=)` keeps its state.
    """


class NodeLostError(WorkerLostError):
    """A whole node is gone, with its store and its workers.

    The world's doing: the host, its network or its node process failed.
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


for _name in __all__:
    # Tracebacks and pickles name the public place, `hoplite_mp.StoreFullError`.
    globals()[_name].__module__ = "hoplite_mp"
