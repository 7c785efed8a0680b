"""Actor: a handle to an object that lives in a process of its own.

Why it exists: a task works on copies of its arguments, so state needs a home. `c.actor(cls, ...)`
makes an object in a process of its own; calling a method of the handle submits a task to that
process and returns a Future.
It must never know: shared memory, processes, who counts handles.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from hoplite_mp.client.actors import About
from hoplite_mp.client.kinds import (
    CONCURRENCY_SHIFT,
    FLAG_ASYNC,
    FLAG_STREAM,
    check_counts,
    is_async,
    yields,
)
from hoplite_mp.client.memory import check_timeout
from hoplite_mp.client.runtime import runtime_of
from hoplite_mp.client.streams import Plan, Stream
from hoplite_mp.errors import ClosedError, ObjectLostError
from hoplite_mp.executor import TIMEOUT_S_MAX
from hoplite_mp.worker import checkpoints
from hoplite_mp.worker.actor import call

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.futures import Future
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.executor import Options
    from hoplite_mp.ref import ObjectRef

__all__ = ["Actor", "ActorCalls", "ActorMethod"]

_turns = itertools.count()


class Actor:
    """A handle to an actor, made by `Cluster.actor` and `Cluster.get_actor`.

    Its attributes are the methods of the actor's class, each of which returns a Future when it is
    called, and `handle(...)` if the class has `__call__`; every other name is an AttributeError.
    The names of the class win, so what the library does with an actor are functions:
    `Actor.close(handle)`, `Actor.kill(handle)`, `Actor.restarts(handle)`.

    Handles travel as arguments, results and inside objects, and are counted as refs are: the actor
    ends with its last handle, after the calls made so far.
    """

    __slots__ = ("__weakref__", "_about", "_cluster", "_identity")

    _identity: ObjectRef[Any]
    _about: About
    _cluster: Any  # held: a Cluster that nobody holds ends

    def __init__(self) -> None:
        raise TypeError("an Actor is made by Cluster.actor(cls, ...)")

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        about: About = _about_of(self)
        if name in about.methods:
            return ActorMethod(_identity_of(self), about, name)
        raise AttributeError(
            f"{about.class_name} has no method {name!r}: a handle of an actor has its methods, "
            "not its data; write a method that returns them"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        about: About = _about_of(self)
        if "__call__" not in about.methods:
            raise TypeError(f"a {about.class_name} is not callable")
        return ActorMethod(_identity_of(self), about, "__call__")(*args, **kwargs)

    def __dir__(self) -> list[str]:
        return sorted(_about_of(self).methods)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"cannot set {name!r}: the actor's data are in another process; write a method for it"
        )

    def __eq__(self, other: object) -> bool:
        if type(other) is not Actor:
            return NotImplemented
        return bool(_identity_of(self) == _identity_of(other))

    def __hash__(self) -> int:
        return hash(_identity_of(self))

    def __repr__(self) -> str:
        about: About = _about_of(self)
        name = f" {about.name!r}" if about.name else ""
        return f"<Actor{name} {about.class_name} {_identity_of(self).id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (_identity_of(self), tuple(_about_of(self)))

    def __del__(self) -> None:
        # Calls that have ended hold the actor until somebody looks after them.
        with contextlib.suppress(Exception):  # half made, or at the end of the interpreter
            runtime_of(_identity_of(self)).actors.handle_dropped()

    @staticmethod
    def close(handle: Actor) -> None:
        """The actor ends after the calls made so far; later ones raise ActorLostError.

        Returns at once. No effect on an actor that has ended.
        """
        identity = _identity_of(handle)
        runtime_of(identity).actors.end(identity, False)

    @staticmethod
    def kill(handle: Actor) -> None:
        """The actor ends now: its process is killed, and the call that runs and those that wait
        raise ActorLostError. Returns at once."""
        identity = _identity_of(handle)
        runtime_of(identity).actors.end(identity, True)

    @staticmethod
    def restarts(handle: Actor) -> int:
        """How often the actor's process has been started again after its death."""
        identity = _identity_of(handle)
        return runtime_of(identity).actors.restarts(identity)


_identity_of = Actor.__dict__["_identity"].__get__
_about_of = Actor.__dict__["_about"].__get__
_set_identity = Actor.__dict__["_identity"].__set__
_set_about = Actor.__dict__["_about"].__set__
_set_cluster = Actor.__dict__["_cluster"].__set__


def _handle(identity: ObjectRef[Any], about: About) -> Actor:
    handle = Actor.__new__(Actor)
    _set_identity(handle, identity)
    _set_about(handle, about)
    with contextlib.suppress(ClosedError, ObjectLostError):  # unpickled where there is no cluster
        face = runtime_of(identity).face
        _set_cluster(handle, None if face is None else face())
    return handle


def _arrived(identity: ObjectRef[Any], about: tuple[Any, ...]) -> Actor:
    """Named in streams."""
    return _handle(identity, About(*about))


class ActorMethod:
    """A method of an actor: calling it submits, and returns a Future."""

    __slots__ = ("_about", "_buffersize", "_copy", "_identity", "_label", "_method", "_timeout")

    def __init__(self, identity: ObjectRef[Any], about: About, method: str) -> None:
        self._identity = identity
        self._about = about
        self._method = method
        self._timeout = about.timeout
        self._copy = about.copy
        self._buffersize = about.buffersize
        self._label = f"{about.class_name}.{method}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs in the actor's process, behind the calls that this process has made before.

        Returns a Future; of a method that yields an iterator of refs, as from `Cluster.stream`."""
        about = self._about
        if self._method not in about.streams:
            many = about.concurrency << CONCURRENCY_SHIFT
            alone = about.checkpoint > 0  # its coroutines run one at a time, as its methods do
            flags = FLAG_ASYNC | many if self._method in about.asyncs and not alone else 0
            return self._submit(flags, (self._method, *args), kwargs)
        runtime = runtime_of(self._identity)

        def begin(plan: Plan) -> Future[Any]:
            return self._submit(FLAG_STREAM, (tuple(plan), self._method, *args), kwargs)

        face = None if runtime.face is None else runtime.face()
        return Stream(runtime, begin, about.retries, self._buffersize, self._label, face)

    def _submit(self, flags: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        identity = self._identity
        actors = runtime_of(identity).actors
        numbered = self._about.checkpoint > 0 and not flags & FLAG_STREAM
        return (actors.submit_numbered if numbered else actors.submit)(
            identity,
            self._about,
            checkpoints.call if numbered else call,
            args,
            kwargs,
            self._timeout,
            self._copy,
            self._label,
            flags,
        )

    def options(self, **changes: Any) -> ActorMethod:
        """The same method with another timeout=, copy=, name= or buffersize=; TypeError for other
        names.

        timeout: seconds of running, then the actor's process is killed, as at a death. copy: the
        result, and values of refs among the arguments, are writable. name: shown in errors.
        """
        unknown = sorted(changes.keys() - {"timeout", "copy", "name", "buffersize"})
        if unknown:
            raise TypeError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} of an "
                "actor's method; there are buffersize, copy, name, timeout"
            )
        changed = ActorMethod(self._identity, self._about, self._method)
        changed._timeout, changed._copy, changed._label = self._timeout, self._copy, self._label
        check_counts(changes)
        changed._buffersize = changes.get("buffersize", self._buffersize)
        if "timeout" in changes:
            timeout = changes["timeout"]
            check_timeout(timeout)
            if timeout is not None and not timeout > 0:
                raise ValueError(f"timeout={timeout!r}: it must be seconds above 0, or None")
            changed._timeout = (
                None if timeout is None or timeout > TIMEOUT_S_MAX else float(timeout)
            )
        if "copy" in changes:
            changed._copy = bool(changes["copy"])
        if changes.get("name") is not None:
            if not isinstance(changes["name"], str):
                raise TypeError(f"name={changes['name']!r}: it must be a text, or None")
            changed._label = changes["name"]
        return changed

    def __repr__(self) -> str:
        return f"<method {self._label} of an Actor>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_arrived, (
            self._identity,
            tuple(self._about),
            self._method,
            {
                "timeout": self._timeout,
                "copy": self._copy,
                "name": self._label,
                "buffersize": self._buffersize,
            },
        )


def _method_arrived(
    identity: ObjectRef[Any], about: tuple[Any, ...], method: str, options: dict[str, Any]
) -> ActorMethod:
    """Named in streams."""
    return ActorMethod(identity, About(*about), method).options(**options)


@functools.cache
def _methods_of(cls: type) -> frozenset[str]:
    """Names that a handle offers: what is callable in the class, dunder methods left out."""
    found = {"__call__"} if any("__call__" in base.__dict__ for base in cls.__mro__[:-1]) else set()
    for name in dir(cls):
        if name.startswith("__") and name.endswith("__"):
            continue
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, (staticmethod, classmethod)) or callable(value):
            found.add(name)
    return frozenset(found)


@functools.cache
def _kinds_of(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """Names of its async methods, and of those that yield."""
    found = {name: getattr(cls, name, None) for name in _methods_of(cls)}
    return (
        frozenset(name for name, method in found.items() if is_async(method)),
        frozenset(name for name, method in found.items() if yields(method)),
    )


class ActorCalls:
    """The part of `Cluster` that makes and finds actors."""

    _runtime: Runtime
    _options: Options

    def actor(self, cls: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Makes `cls(*args, **kwargs)` in a process of its own, and returns a handle at once.

        A method call on the handle runs there and returns a Future; calls of one process run in
        the order in which they were made, one at a time. Refs and Futures among the arguments are
        resolved as in `submit`. What the constructor raises, every call raises.

        Of `options`: name: find it with `get_actor`, ValueError if it is taken, or with
        get_if_exists=True the one that has it. detached=True: it lives without handles until it is
        closed or killed or the cluster ends. restarts=n: after the death of its process the
        constructor runs again, up to n times, on another host if this one is gone (of those that
        node= names, if it was given); calls that had not begun go on, the one that ran raises
        ActorLostError unless retries= was given. checkpoint=k: after every k calls its state
        (pickle) is kept on two hosts, and it begins again with that; a call that is tried again is
        applied once. With checkpoint=1 no result is given out before the state after it is kept.
        timeout, copy: of its calls. resources: it runs where these are, and keeps them for life.
        """
        if not isinstance(cls, type):
            raise TypeError(f"an actor is made from a class, not from a {type(cls).__name__}")
        options = self._options
        if options.checkpoint and getattr(options, "concurrency", 1) > 1:
            raise ValueError(
                "checkpoint= with concurrency= above 1: a state that other calls are changing "
                "cannot be kept; leave one of them out"
            )
        runtime = self._runtime
        places = options.node or (runtime.tasks.node_number,)
        if options.resources is not None:
            nodes = options.node or ()
            places = (runtime.demands.place_for_actor(options.resources, nodes, next(_turns)),)
        about = About(
            cls.__qualname__.rpartition("<locals>.")[2],
            options.name or "",
            _methods_of(cls),
            options.retries or 0,
            options.timeout,
            options.copy,
            options.restarts,
            tuple(options.node or ()),
            options.checkpoint,
            *_kinds_of(cls),
            options.concurrency,
            options.buffersize,
        )
        return _handle(
            *runtime.actors.open(
                cls,
                args,
                kwargs,
                about,
                options.get_if_exists,
                options.detached,
                places[next(_turns) % len(places)],
                options.resources or (),
            )
        )

    def get_actor(self, name: str) -> Actor:
        """The living actor of that name, in the whole cluster. LookupError: there is none."""
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: it must be a text that is not empty")
        found = self._runtime.actors.find(name)
        if found is None:
            raise LookupError(f"there is no actor named {name!r} in this cluster, or it has ended")
        return _handle(*found)
