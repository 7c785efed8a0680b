"""The exceptions in hoplite_mp.

Each class derives from `HopliteError` and from the matching builtin, so `except TimeoutError` works
as usual. Exceptions raised by tasks keep their types. All errors can be pickled with their args.
The classes for lost workers and hosts are created when they are first used (`LOST`), so they must
not be imported: write `errors.WorkerLostError` where they are raised or caught.

A message states what happened, where, how much, and what to do about it.
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
    "StateNotSavedError",
    "StoreFullError",
    "TaskError",
    "WorkerLostError",
]


class HopliteError(Exception):
    """The base class of all errors in this library.

    Examples
    --------
    >>> try:
    ...     c.empty(10**15)
    ... except hoplite_mp.HopliteError as error:
    ...     print(type(error).__name__)
    StoreFullError
    """


class ClosedError(HopliteError, RuntimeError):
    """The cluster, executor or Group is closed, or belongs to the parent of a forked process.

    Keep the `with` block open as long as its objects are used.

    Examples
    --------
    >>> pool = c.executor(1)
    >>> pool.shutdown()
    >>> pool.submit(abs, -1)
    Traceback (most recent call last):
        ...
    hoplite_mp.ClosedError: cannot schedule new futures after shutdown: ...
    """


class ConfigError(HopliteError, ValueError):
    """A limit has an invalid value. The message contains the field and the allowed values.

    The value comes from an argument or from the environment.

    Examples
    --------
    >>> hoplite_mp.Config(retries=-1)
    Traceback (most recent call last):
        ...
    hoplite_mp.ConfigError: retries=-1 is not allowed: use a whole number from 0 ...
    """


class TaskError(HopliteError, RuntimeError):
    """A task raised an exception that cannot be raised here; this error contains its text.

    Either the exception cannot be pickled, or it is a SystemExit, KeyboardInterrupt or
    GeneratorExit, which would end the program that reads the result. In the second case, the
    exception is the `__cause__` (`hoplite_mp.Executor` raises it like the standard pool). Other
    exceptions are raised unchanged.

    Examples
    --------
    >>> import threading
    >>> def failing():
    ...     raise RuntimeError("out of paper", threading.Lock())
    >>> c.submit(failing).result()
    Traceback (most recent call last):
        ...
    hoplite_mp.TaskError: ...out of paper...
    """


class ObjectLostError(HopliteError, LookupError):
    """The object was deleted, or all processes that held its bytes have died.

    Examples
    --------
    >>> ref = c.put(1)
    >>> c.delete(ref)
    >>> c.get(ref)
    Traceback (most recent call last):
        ...
    hoplite_mp.ObjectLostError: ...
    """


class PeerLostError(HopliteError, ConnectionError):
    """A Group call needs a member that has died or left.

    That member was the root or the sender, or the Group is strict.

    Examples
    --------
    >>> def peer(rank):
    ...     g = hoplite_mp.current().group("peers", 2, rank)
    ...     g.barrier()
    ...     if rank == 1:
    ...         g.recv(source=0)  # rank 0 leaves without sending
    >>> c.spmd(peer, 2)[1].result()
    Traceback (most recent call last):
        ...
    hoplite_mp.PeerLostError: group 'peers': ...
    """


class ManagerLostError(HopliteError, ConnectionError):
    """No manager can be reached at that address, or the manager has died.

    Check the address, and whether the cluster is still running.

    Examples
    --------
    >>> nobody = dict(address="127.0.0.1:1", token="0123456789abcdef0123456789abcdef")
    >>> hoplite_mp.Cluster(**nobody, config=hoplite_mp.Config(connect_timeout_s=0.1))
    Traceback (most recent call last):
        ...
    hoplite_mp.ManagerLostError: ...
    """


class StoreFullError(HopliteError, MemoryError):
    """The value is larger than the store, or the store had no space for it in time.

    The message lists how the memory is used. Free arrays and refs, or raise the limit.

    Examples
    --------
    >>> c.empty(10**15)
    Traceback (most recent call last):
        ...
    hoplite_mp.StoreFullError: ...
    """


class StateNotSavedError(StoreFullError):
    """A call to an actor with `options(checkpoint=)` has taken effect, but the state was not saved.

    The store and the disk had no space for the state. Repeating the call would apply it twice. The
    next call saves the state if there is space.

    Examples
    --------
    >>> issubclass(hoplite_mp.StateNotSavedError, hoplite_mp.StoreFullError)
    True
    """


class HopliteTimeoutError(HopliteError, TimeoutError):
    """A wait did not end within its timeout.

    The operation continues, and you can wait for it again. Collective Group calls are the
    exception: after a timeout, the rank has left the Group.

    Examples
    --------
    >>> import time
    >>> future = c.submit(time.sleep, 60)
    >>> future.result(timeout=0.01)
    Traceback (most recent call last):
        ...
    hoplite_mp.HopliteTimeoutError: the result of sleep() was not ready within ...
    >>> future.cancel(force=True)
    True
    """


class ReduceError(HopliteError, RuntimeError):
    """Too few sources of a collective operation succeeded. `__cause__` is the first failure.

    A source fails if the task that computes it fails.

    Examples
    --------
    >>> parts = [c.put(1), c.submit(divmod, 1, 0)]
    >>> c.get(c.reduce(parts, num=2))
    Traceback (most recent call last):
        ...
    hoplite_mp.ReduceError: ...
    >>> int(c.get(c.reduce(parts, num=1)))
    1
    """


class ProtocolError(HopliteError, ConnectionError):
    """The peer of a connection violated the protocol.

    The peer runs a different version of this library, or a different program.

    Examples
    --------
    >>> issubclass(hoplite_mp.ProtocolError, ConnectionError)
    True
    """


class AuthError(HopliteError, PermissionError):
    """The token is wrong or missing. All processes in the cluster need the same token.

    Examples
    --------
    >>> issubclass(hoplite_mp.AuthError, PermissionError)
    True
    """


if TYPE_CHECKING:
    from concurrent.futures.process import BrokenProcessPool

    class WorkerLostError(HopliteError, BrokenProcessPool): ...

    class ActorLostError(WorkerLostError): ...

    class NodeLostError(WorkerLostError): ...


# Name -> (base, docstring) for the subclasses of BrokenProcessPool. They are created lazily,
# because importing concurrent.futures.process costs 9 to 19 ms.
LOST = {
    "WorkerLostError": (
        "",
        """A worker died while it ran the task, and the task's retries are used up.

    It is a subclass of BrokenProcessPool, but the pool continues with another worker. The cause is
    outside the program (a kill, lack of memory) or in the task (a crash in compiled code).

    Examples
    --------
    >>> import os
    >>> c.options(retries=0).submit(os._exit, 1).result()
    Traceback (most recent call last):
        ...
    hoplite_mp.WorkerLostError: ...
    """,
    ),
    "ActorLostError": (
        "WorkerLostError",
        """The actor was closed or killed, or its process has exited, and its state is lost.

    `options(restarts=)` restarts an actor after the death of its process.

    Examples
    --------
    >>> numbers = c.actor(list, (1, 2))
    >>> hoplite_mp.Actor.kill(numbers)
    >>> numbers.index(2).result()
    Traceback (most recent call last):
        ...
    hoplite_mp.ActorLostError: ...
    """,
    ),
    "NodeLostError": (
        "WorkerLostError",
        """A node is lost, with its store and workers: its host, network or process has failed.

    Examples
    --------
    >>> issubclass(hoplite_mp.NodeLostError, hoplite_mp.WorkerLostError)
    True
    """,
    ),
}


def _make_lost() -> dict[str, type[HopliteError]]:
    try:
        from concurrent.futures.process import BrokenProcessPool as Broken
    except (ImportError, OSError):
        # No descriptor is free, or the interpreter is shutting down. A pickled error contains only
        # the name of its class, so other processes use their own class.
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
        found = globals().setdefault("_lost", _make_lost())  # all threads use the first result
        globals().update(found)
        return found[name]


for _name in set(__all__) - set(LOST):
    # Tracebacks and pickles show the public name, `hoplite_mp.StoreFullError`.
    globals()[_name].__module__ = "hoplite_mp"
