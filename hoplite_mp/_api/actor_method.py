"""ActorMethod: a method of an actor, as its handle gives it.

`handle.method` can be called, given other options, and sent to other processes; calling it submits
a task to the actor's process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hoplite_mp._api.executor import TIMEOUT_S_MAX
from hoplite_mp._client.actors import ActorInfo
from hoplite_mp._client.deadlines import check_timeout
from hoplite_mp._client.function_kind import (
    CONCURRENCY_SHIFT,
    FLAG_ASYNC,
    FLAG_STREAM,
    check_counts,
)
from hoplite_mp._client.runtime import runtime_of
from hoplite_mp._client.streams import Stream, StreamPlan
from hoplite_mp._worker import checkpoints
from hoplite_mp._worker.actor import call

if TYPE_CHECKING:
    from hoplite_mp._client.futures import Future
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["ActorMethod"]


class ActorMethod:
    """A method of an actor. Calling it submits a task, and returns a Future."""

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
        self._flags = FLAG_STREAM if self._streams else 0
        # With checkpoints, async methods run one at a time, as all other methods do.
        if method in about.asyncs and not self._streams and not self._numbered:
            self._flags = FLAG_ASYNC | about.concurrency << CONCURRENCY_SHIFT

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the method in the actor's process, after the calls that this process made before.

        Returns a Future; for a method that yields, an iterator of refs as from `Cluster.stream`."""
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
            Seconds that a call may run. After that the actor's process is killed, which counts as
            its death.
        copy : bool, optional
            True: the result, and the values of refs among the arguments, are writable copies.
        name : str, optional
            Shown in errors and traces.
        buffersize : int, optional
            For a method that yields: how many items it may be ahead of its reader.

        Returns
        -------
        ActorMethod
            The method with these options.

        Raises
        ------
        TypeError
            An option that does not exist.
        ValueError
            A value that is not allowed.

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
                "actor's method; there are buffersize, copy, name, timeout. All others are given "
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
    """Rebuilds a method that was pickled; pickles name this function."""
    return ActorMethod(identity, ActorInfo.of(about), method).options(**options)
