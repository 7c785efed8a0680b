"""Actor: a handle to an object in a dedicated process.

A task works on copies of its arguments, so state that outlives a task needs a dedicated process.
`c.actor(cls, ...)` creates an object in such a process. A method call on the handle submits a task
to the process, and returns a Future.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.executor import TIMEOUT_S_MAX
from hoplite_mp._api.nodes import working_places
from hoplite_mp._client.actors import ActorInfo
from hoplite_mp._client.functions import check_counts, is_async, yields
from hoplite_mp._client.option_checks import check_name, refuse_unused
from hoplite_mp._client.runtime import runtime_of
from hoplite_mp._client.streams import Stream, StreamPlan
from hoplite_mp._common.clock import check_timeout
from hoplite_mp._common.object_states import CONCURRENCY_SHIFT, TASK_ASYNC, TASK_STREAM
from hoplite_mp._protocol.fields import NAME_CHARS_MAX, shorten
from hoplite_mp._worker import checkpoints
from hoplite_mp._worker.actor import call
from hoplite_mp.errors import ClosedError, ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp._api.executor import Options
    from hoplite_mp._client.futures import Future
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["Actor", "ActorCalls", "ActorMethod"]


class ActorMethod:
    """A method of an actor, as an attribute of a handle. Calling it submits a task, and returns a
    Future. `options` changes the options of its calls. It can be sent to other processes."""

    __slots__ = (
        *("_about", "_buffersize", "_copy", "_flags", "_identity", "_label", "_method"),
        *("_numbered", "_streams", "_timeout"),
    )

    def __init__(self, identity: ObjectRef[Any], about: ActorInfo, method: str) -> None:
        self._identity = identity
        self._about = about
        self._method = method
        self._timeout = about.timeout
        self._copy = about.copy
        self._buffersize = about.buffersize
        self._label = f"{about.class_name}.{method}"
        self._streams = method in about.streams
        self._numbered = about.checkpoint > 0
        self._flags = TASK_STREAM if self._streams else 0
        # With checkpoints, async methods run one at a time, like all other methods.
        if method in about.asyncs and not self._streams and not self._numbered:
            self._flags = TASK_ASYNC | about.concurrency << CONCURRENCY_SHIFT

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method in the actor's process, after this process's earlier calls.

        Returns a Future or, for a method that yields, an iterator of refs, like
        `Cluster.stream`."""
        if not self._streams:
            return self._submit((self._method, *args), kwargs)
        runtime = runtime_of(self._identity)

        def begin(plan: StreamPlan) -> Future[Any]:
            return self._submit((tuple(plan), self._method, *args), kwargs)

        face = None if runtime.face is None else runtime.face()
        return Stream(runtime, begin, self._about.retries, self._buffersize, self._label, face)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        identity = self._identity
        actors = runtime_of(identity).actors
        numbered = self._numbered and not self._streams
        return (actors.submit_numbered if numbered else actors.submit)(
            identity,
            self._about,
            checkpoints.call if numbered else call,
            args,
            kwargs,
            self._timeout,
            self._copy,
            self._label,
            self._flags,
        )

    def options(self, **changes: Any) -> ActorMethod:
        """The same method with other options for its calls.

        Parameters
        ----------
        timeout : float, optional
            The maximum duration of a call in seconds. After this time the actor's process is
            killed, which counts as its death.
        copy : bool, optional
            True: the result, and the values of refs among the arguments, are writable copies.
        name : str, optional
            Shown in errors and traces.
        buffersize : int, optional
            For a method that yields: the number of items by which it may be ahead of its reader.

        Returns
        -------
        ActorMethod
            The method with these options.

        Raises
        ------
        TypeError
            An option does not exist.
        ValueError
            A value is not allowed.

        Examples
        --------
        >>> numbers = c.actor(list, (3, 4))
        >>> numbers.index.options(timeout=10)(4).result()
        1
        """
        unknown = sorted(changes.keys() - {"timeout", "copy", "name", "buffersize"})
        if unknown:
            raise TypeError(
                f"unknown option{'s' if len(unknown) > 1 else ''} {', '.join(unknown)} of an "
                "actor's method; there are buffersize, copy, name, timeout. All others belong "
                "to the actor: c.options(...).actor(...)"
            )
        changed = ActorMethod(self._identity, self._about, self._method)
        changed._timeout, changed._copy, changed._label = self._timeout, self._copy, self._label
        check_counts(changes)
        changed._buffersize = changes.get("buffersize", self._buffersize)
        if "timeout" in changes:
            timeout = changes["timeout"]
            check_timeout(timeout)
            if timeout is not None and not timeout > 0:
                raise ValueError(f"timeout={timeout!r}: it must be a positive number of seconds")
            changed._timeout = (
                None if timeout is None or timeout > TIMEOUT_S_MAX else float(timeout)
            )
        if "copy" in changes:
            changed._copy = bool(changes["copy"])
        if changes.get("name") is not None:
            if not isinstance(changes["name"], str):
                raise TypeError(f"name={changes['name']!r}: it must be a string, or None")
            changed._label = changes["name"]
        return changed

    def __repr__(self) -> str:
        return f"<method {self._label} of an Actor>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _method_arrived, (
            self._identity,
            self._about.plain,
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
    """Unpickles a method. Pickles contain the name of this function."""
    return ActorMethod(identity, ActorInfo.of(about), method).options(**options)


_turns = itertools.count()


class Actor:
    """A handle to an actor, an object in a dedicated process.

    Created by `Cluster.actor`, and found by `Cluster.get_actor`. Its attributes are the methods of
    the actor's class. A method call runs in the actor's process, and returns a Future; a call to a
    method that yields returns an iterator of refs, like `Cluster.stream`. `handle(...)` works if
    the class has `__call__`. Any other attribute raises AttributeError, because a handle has no
    data.

    The operations on the actor itself are static methods, so that they do not hide methods of the
    class: `Actor.close(handle)`, `Actor.kill(handle)`, `Actor.restarts(handle)`.
    `handle.method.options(timeout=, copy=, name=, buffersize=)` changes one call.

    Handles can be arguments and results of tasks, and parts of objects. They are counted like
    refs: the actor's process exits when its last handle is gone and the calls made so far are
    done.

    Examples
    --------
    >>> class Counter:
    ...     def __init__(self):
    ...         self.value = 0
    ...     def add(self, n):
    ...         self.value += n
    ...         return self.value
    >>> counter = c.actor(Counter)
    >>> [counter.add(n).result() for n in (1, 2, 3)]
    [1, 3, 6]
    >>> counter.add.options(timeout=10)(4).result()
    10
    """

    __module__ = "hoplite_mp"  # as users import it

    __slots__ = ("__weakref__", "_about", "_cluster", "_identity", "_methods")

    _identity: ObjectRef[Any]
    _about: ActorInfo
    _cluster: Any  # kept alive, because a Cluster without references shuts down
    _methods: dict[str, ActorMethod]  # the methods called so far; they do not refer to the handle

    def __init__(self) -> None:
        raise TypeError("an Actor can be created only by Cluster.actor(cls, ...)")

    def __getattribute__(self, name: str) -> Any:
        methods: dict[str, ActorMethod] = _methods_met(self)
        found = methods.get(name)
        if found is not None:
            return found
        if name.startswith("__") and name.endswith("__"):
            return object.__getattribute__(self, name)
        about: ActorInfo = _about_of(self)
        if name in about.methods:
            return methods.setdefault(name, ActorMethod(_identity_of(self), about, name))
        if name in ("close", "kill", "restarts"):
            raise AttributeError(
                f"{about.class_name} has no method {name!r}: call "
                f"hoplite_mp.Actor.{name}(handle) for the actor itself"
            )
        raise AttributeError(
            f"{about.class_name} has no method {name!r}: an actor's handle has its methods, not "
            "its data; write a method that returns the data"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        about: ActorInfo = _about_of(self)
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
        about: ActorInfo = _about_of(self)
        name = f" {about.name!r}" if about.name else ""
        return f"<Actor{name} {about.class_name} {_identity_of(self).id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (_identity_of(self), _about_of(self).plain)

    def __del__(self) -> None:
        # Finished calls keep the actor alive until this process has processed their completions.
        with contextlib.suppress(Exception):  # an incomplete handle, or the interpreter is exiting
            runtime_of(_identity_of(self)).actors.handle_dropped()

    @staticmethod
    def close(handle: Actor) -> None:
        """Closes the actor after the calls made so far; later calls raise ActorLostError.

        Returns immediately. Has no effect if the actor has already ended.

        Parameters
        ----------
        handle : Actor
            The actor.

        Examples
        --------
        >>> numbers = c.actor(list, (3, 4))
        >>> position = numbers.index(4)
        >>> hoplite_mp.Actor.close(numbers)
        >>> position.result()
        1
        """
        identity = _checked(handle)
        runtime_of(identity).actors.end(identity, False)

    @staticmethod
    def kill(handle: Actor) -> None:
        """Kills the actor's process.

        Running and waiting calls raise ActorLostError. Returns immediately.

        Parameters
        ----------
        handle : Actor
            The actor.

        Examples
        --------
        >>> numbers = c.actor(list, (3, 4))
        >>> hoplite_mp.Actor.kill(numbers)
        >>> numbers.index(4).result()
        Traceback (most recent call last):
            ...
        hoplite_mp.ActorLostError: ...
        """
        identity = _checked(handle)
        runtime_of(identity).actors.end(identity, True)

    @staticmethod
    def restarts(handle: Actor) -> int:
        """The number of times that the actor's process was restarted after its death.

        Parameters
        ----------
        handle : Actor
            The actor.

        Returns
        -------
        int
            At most `options(restarts=)`.

        Examples
        --------
        >>> hoplite_mp.Actor.restarts(c.actor(list))
        0
        """
        identity = _checked(handle)
        return runtime_of(identity).actors.restarts(identity)


_identity_of = Actor.__dict__["_identity"].__get__
_about_of = Actor.__dict__["_about"].__get__
_methods_met = Actor.__dict__["_methods"].__get__
_set_methods = Actor.__dict__["_methods"].__set__
_set_identity = Actor.__dict__["_identity"].__set__
_set_about = Actor.__dict__["_about"].__set__
_set_cluster = Actor.__dict__["_cluster"].__set__


def _checked(handle: Any) -> ObjectRef[Any]:
    """Returns the identity in an actor's handle. Raises TypeError for any other object."""
    if not isinstance(handle, Actor):
        raise TypeError(f"expected the handle of an actor, not {handle!r:.80}")
    return _identity_of(handle)  # type: ignore[no-any-return]


def _handle(identity: ObjectRef[Any], about: ActorInfo) -> Actor:
    handle = Actor.__new__(Actor)
    _set_identity(handle, identity)
    _set_about(handle, about)
    _set_methods(handle, {})
    with contextlib.suppress(ClosedError, ObjectLostError):  # this process has no cluster
        face = runtime_of(identity).face
        _set_cluster(handle, None if face is None else face())
    return handle


def _arrived(identity: ObjectRef[Any], about: tuple[Any, ...]) -> Actor:
    """Unpickles a handle. Pickles contain the name of this function."""
    return _handle(identity, ActorInfo.of(about))


def _methods_of(cls: type) -> frozenset[str]:
    """The names of a handle's methods: all callables of the class, excluding dunder methods other
    than `__call__`."""
    found = {"__call__"} if any("__call__" in base.__dict__ for base in cls.__mro__[:-1]) else set()
    for name in dir(cls):
        if name.startswith("__") and name.endswith("__"):
            continue
        value = inspect.getattr_static(cls, name, None)
        if isinstance(value, (staticmethod, classmethod)) or callable(value):
            found.add(name)
    return frozenset(found)


def _kinds_of(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """The names of the class's async methods, and of its methods that yield."""
    found = {name: getattr(cls, name, None) for name in _methods_of(cls)}
    return (
        frozenset(name for name, method in found.items() if is_async(method)),
        frozenset(name for name, method in found.items() if yields(method)),
    )


class ActorCalls:
    """The `Cluster` methods that create and find actors."""

    _runtime: Runtime
    _options: Options

    def actor(self, cls: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Actor:
        """Creates `cls(*args, **kwargs)` in a dedicated process, and returns a handle immediately.

        A method call on the handle runs in the dedicated process, and returns a Future. Calls from
        one process run in order, one at a time (`options(concurrency=n)`: up to n). If the
        constructor raises an exception, every call raises it.

        Parameters
        ----------
        cls : type
            The class of the object.
        *args, **kwargs
            Arguments of its constructor. Refs and Futures among them are replaced by their values,
            as in `submit`.

        Returns
        -------
        Actor
            A handle. The actor's process exits when its last handle is gone and the calls made so
            far are done.

        Raises
        ------
        TypeError
            `cls` is not a class.
        ValueError
            The name is taken or too long, `checkpoint` is given with a `concurrency` above 1, no
            node has the `resources`, or the names of the class's methods take more than 256 KiB.

        Notes
        -----
        These options are for actors:

        name : str
            `get_actor` finds the actor by this name, in the whole cluster.
        get_if_exists : bool
            True: if the name is taken, the result is a handle to the actor with that name.
        detached : bool
            True: the actor needs no handles. It runs until `Actor.close` or `Actor.kill` is
            called, or the cluster shuts down.
        restarts : int
            Maximum number of restarts after the death of the process, on another host if the
            actor's host is lost. After a restart, the constructor runs again, followed by the calls
            that had not begun. The call that was running raises ActorLostError unless `retries` is
            given.
        checkpoint : int
            After every `checkpoint` calls, the actor's pickled state is stored on two hosts. A
            restarted actor continues from this state, and a retried call changes the state only
            once. With 1, a call returns its result only after the new state is stored. If there is
            no space for the state, the call raises StateNotSavedError, even though it has changed
            the actor.
        timeout, copy
            Defaults for the actor's calls, as in `options`.
        resources : dict
            The actor runs on a node with these resources, and keeps them until its process exits.

        Examples
        --------
        >>> class Model:
        ...     def __init__(self, size):
        ...         self.weights = np.zeros(size)
        ...     def apply(self, gradient):
        ...         self.weights -= 0.5 * gradient
        ...         return self.weights
        >>> model = c.options(restarts=1).actor(Model, 2)
        >>> model.apply(np.ones(2)).result()
        array([-0.5, -0.5])
        """
        if not isinstance(cls, type):
            raise TypeError(f"an actor is created from a class, not from {cls!r:.80}")
        options = self._options
        refuse_unused(options, "actor")
        if options.checkpoint and getattr(options, "concurrency", 1) > 1:
            raise ValueError(
                "checkpoint= with concurrency= above 1: the state cannot be saved while other "
                "calls are changing it; leave one of the options out"
            )
        check_name(options.name or "", "an actor")
        runtime = self._runtime
        places = self._actor_places()
        if options.resources is not None:
            demands, named = runtime.demands, options.node or ()
            places = iter(demands.places_for_actor(options.resources, named, next(_turns)))
        about = ActorInfo(
            shorten(cls.__qualname__.rpartition("<locals>.")[2], NAME_CHARS_MAX, " [...] "),
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
                places,
                options.env,
                options.retry_exceptions,
                options.resources or (),
            )
        )

    def _actor_places(self) -> Iterator[int]:
        """Yields the nodes to try for an actor. With node=, these are the given nodes, beginning
        with a different one each time. Otherwise, they are this node and then, in case it is
        leaving, all other nodes with workers."""
        runtime, named = self._runtime, self._options.node
        if named:
            first = next(_turns) % len(named)
            yield from (*named[first:], *named[:first])
            return
        own = runtime.tasks.node_number
        yield own
        yield from (number for number, _ in working_places(runtime) if number != own)

    def get_actor(self, name: str) -> Actor:
        """Finds the living actor with this name, in the whole cluster.

        Parameters
        ----------
        name : str
            The actor's name, from `options(name=)`.

        Returns
        -------
        Actor
            A new handle.

        Raises
        ------
        LookupError
            There is no such actor, or it has ended.
        ValueError
            The name is not valid: it is too long, or has lone surrogates.

        Examples
        --------
        >>> first = c.options(name="words").actor(dict, a=1)
        >>> c.get_actor("words").get("a").result()
        1
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"name={name!r}: it must be a non-empty string")
        check_name(name, "an actor")
        found = self._runtime.actors.find(name)
        if found is None:
            raise LookupError(f"there is no actor named {name!r} in this cluster, or it has ended")
        identity, about = found
        return _handle(identity, about)
