"""What every handle of a queue, lock, semaphore or event does: making, finding, travelling.

Why it exists: each is a handle of an actor, with methods of its own instead of the actor's. It
travels and is counted as that is.
It must never know: what is decided in the actor, how a promise fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hoplite_mp import errors
from hoplite_mp.actor import Actor, _about_of, _identity_of, _methods_of
from hoplite_mp.client.memory import check_timeout, deadline_ns
from hoplite_mp.client.promises import life_of
from hoplite_mp.client.runtime import runtime_of
from hoplite_mp.cluster import current
from hoplite_mp.errors import ObjectLostError
from hoplite_mp.ref import by_ref
from hoplite_mp.sync.steps import Read, Until
from hoplite_mp.sync.waiting import Answer

if TYPE_CHECKING:
    from collections.abc import Generator

    from hoplite_mp.client.futures import Future
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef
    from hoplite_mp.sync.waiting import Ticket

__all__ = ["Handle"]

H = TypeVar("H", bound="Handle")
KNOWN_MAX = 4096  # actors of which a process remembers that they know it


class Handle:
    """One of them."""

    __slots__ = ("__weakref__", "_actor")

    _served: ClassVar[type]
    _actor: Actor

    def _make(self, args: tuple[Any, ...], name: str | None, node: Any, detached: bool) -> None:
        """A new actor; or, under a name that is taken, that one."""
        options = {"node": node, "name": name, "detached": detached, "get_if_exists": bool(name)}
        given = {key: value for key, value in options.items() if value is not None}
        self._actor = current().options(**given).actor(self._served, *args)
        about = _about_of(self._actor)
        if about.methods != _methods_of(self._served) or about.class_name != self._served.__name__:
            raise ValueError(
                f"there is an actor named {name!r} already, of class {about.class_name}, and not a "
                f"hoplite_mp.{type(self).__name__}: choose another name"
            )

    @property
    def actor(self) -> Actor:
        """The actor's handle, for `Actor.close(q.actor)` and `Actor.kill(q.actor)`.

        Those end it when it was made with detached=True.

        Examples
        --------
        >>> lock = hoplite_mp.Lock(detached=True)
        >>> hoplite_mp.Actor.close(lock.actor)
        """
        return self._actor

    @property
    def _runtime(self) -> Runtime:
        return runtime_of(_identity_of(self._actor))

    def __eq__(self, other: object) -> bool:
        return self._actor == other._actor if isinstance(other, Handle) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._actor)

    def __repr__(self) -> str:
        name = _about_of(self._actor).name
        label = f" {name!r}" if name else ""
        return f"<hoplite_mp.{type(self).__name__}{label} {_identity_of(self._actor).id}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (type(self), self._actor, self._extras())

    def _extras(self) -> tuple[Any, ...]:
        """What a handle knows beside its actor."""
        return ()

    def _take_extras(self) -> None: ...

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = getattr(self._actor, method)(*args)
        return future

    def _process(self) -> bytes:
        """The name of this process; the actor learns of its death from now on."""
        life = life_of(self._runtime)
        identity = _identity_of(self._actor)._id
        if identity not in life.known_to:
            with life.lock:  # before any call of another thread that sees it there
                if identity not in life.known_to:
                    self._call("enter", life.process, by_ref(life.promise))
                    if len(life.known_to) >= KNOWN_MAX:
                        life.known_to.clear()
                    life.known_to.add(identity)
        return life.process

    def _ticket(self) -> Ticket:
        process = self._process()
        return process, next(life_of(self._runtime).turns)

    def _until(
        self, promised: ObjectRef[Any], deadline: int
    ) -> Generator[Future[Any] | Until | Read, Any, Answer | None]:
        """What a promise gives; None at the deadline. ActorLostError: the actor has ended."""
        runtime = self._runtime
        if not (yield Until(runtime, promised, deadline)):
            return None
        try:
            return Answer((yield Read(runtime, promised, False)))
        except ObjectLostError as lost:
            yield self._call("ping")  # raises why
            raise errors.ActorLostError(f"the actor of {self!r} has lost its state") from lost


def _arrived(kind: type[H], actor: Actor, extras: tuple[Any, ...]) -> H:
    """Named in streams."""
    handle = kind.__new__(kind)
    handle._actor = actor
    handle._take_extras(*extras)
    return handle


def waits(block: bool, timeout: float | None) -> tuple[bool, int]:
    """Whether a call with these arguments waits at all, and until when."""
    check_timeout(timeout)
    return block and (timeout is None or timeout > 0), deadline_ns(timeout)
