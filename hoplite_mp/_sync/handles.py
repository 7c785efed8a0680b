"""The base class for the handles of queues, locks, semaphores and events: creation and pickling.

Each handle contains an actor's handle, and has its own methods in place of the actor's. Like the
actor's handle, it can be sent to other processes, and keeps the actor alive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from hoplite_mp import errors
from hoplite_mp._api.actor import Actor, _about_of, _identity_of, _methods_of
from hoplite_mp._api.cluster import current
from hoplite_mp._client.futures import Future
from hoplite_mp._client.runtime import runtime_of
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS, check_timeout, deadline_ns
from hoplite_mp._common.ref import by_ref
from hoplite_mp._sync.sync_actors import life_of
from hoplite_mp._sync.waiting import CallAnswer
from hoplite_mp.errors import ObjectLostError

if TYPE_CHECKING:
    from collections.abc import Generator

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._sync.waiting import Ticket


__all__ = ["Handle", "Read", "Until", "run", "run_async"]

# The same code runs in threads, which may block, and in event loops, which must not block.
#
# Each method of a queue or a lock consists of a few calls to an actor, with waits between them.
# Ctrl-C or a cancelled `await` may interrupt each call and each wait. A method is written once, as
# a generator that yields the objects to wait for: `run` blocks until these objects are done, and
# `run_async` awaits them.


T = TypeVar("T")


class Until(NamedTuple):
    """A step that waits until the object is done, or until the deadline (in nanoseconds of the
    monotonic clock). Its result is whether the object is done."""

    runtime: Runtime
    ref: ObjectRef[Any]
    deadline: int

    def block(self) -> bool:
        oid = self.runtime.memory.local_id(self.ref)
        return self.runtime.submitter.waiting.wait_many([oid], 1, self.deadline)

    async def sleep(self) -> bool:
        from hoplite_mp._client.awaiting import ended

        left = None if self.deadline == FOREVER_NS else self.deadline - clock.monotonic_ns()
        oid = self.runtime.memory.local_id(self.ref)
        seconds = None if left is None else max(0.0, left / 1e9)
        done = await ended(self.runtime.submitter, oid, seconds)
        self.runtime.memory.check_lost()
        return done


class Read(NamedTuple):
    """A step that reads the value of the object."""

    runtime: Runtime
    ref: ObjectRef[Any]
    writable: bool

    def block(self) -> Any:
        memory = self.runtime.memory
        return memory.read(memory.local_id(self.ref), FOREVER_NS, self.writable)

    async def sleep(self) -> Any:
        from hoplite_mp._client.awaiting import in_thread, value_of

        if not self.writable:
            return await value_of(self.runtime.submitter, self.ref)
        return await in_thread(self.runtime.submitter, self.block)


def run(steps: Generator[Future[Any] | Until | Read, Any, T]) -> T:
    """Runs the steps in this thread, and returns the generator's result."""
    got: Any = None
    error: BaseException | None = None
    try:
        while True:
            wanted = steps.send(got) if error is None else steps.throw(error)
            got, error = None, None
            try:
                got = wanted.result() if isinstance(wanted, Future) else wanted.block()
            except BaseException as raised:
                error = raised
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        del error  # avoids a reference cycle through the traceback


async def run_async(steps: Generator[Future[Any] | Until | Read, Any, T]) -> T:
    """Runs the steps in the running event loop, and returns the generator's result."""
    got: Any = None
    error: BaseException | None = None
    try:
        while True:
            wanted = steps.send(got) if error is None else steps.throw(error)
            got, error = None, None
            try:
                got = await wanted if isinstance(wanted, Future) else await wanted.sleep()
            except BaseException as raised:
                error = raised
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    finally:
        del error


H = TypeVar("H", bound="Handle")
KNOWN_MAX = 4096  # maximum number of actors recorded as having received this process's life


class Handle:
    """The base class of the handles. A subclass sets `_served`, the class of its actor's object."""

    __slots__ = ("__weakref__", "_actor")

    _served: ClassVar[type]
    _actor: Actor

    def _make(self, args: tuple[Any, ...], name: str | None, node: Any, detached: bool) -> None:
        """Creates the actor, or opens the existing actor with this name."""
        options = {"node": node, "name": name, "detached": detached, "get_if_exists": bool(name)}
        given = {key: value for key, value in options.items() if value is not None}
        self._actor = current().options(**given).actor(self._served, *args)
        about = _about_of(self._actor)
        if about.methods != _methods_of(self._served) or about.class_name != self._served.__name__:
            raise ValueError(
                f"there is already an actor named {name!r}, of class {about.class_name} instead of "
                f"hoplite_mp.{type(self).__name__}: choose another name"
            )

    @property
    def actor(self) -> Actor:
        """The actor's handle, for `Actor.close(q.actor)` and `Actor.kill(q.actor)`.

        An object with detached=True ends only after one of these calls.

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
        """The handle's data, without its actor."""
        return ()

    def _take_extras(self) -> None: ...

    # -- calls ---------------------------------------------------------------------------------

    def _call(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = getattr(self._actor, method)(*args)
        future._reports = False  # some results are never read, so their errors are not reported
        return future

    def _process(self) -> bytes:
        """Returns the bytes that identify this process. The first call registers the process with
        the actor, so that the actor detects its death."""
        life = life_of(self._runtime)
        identity = _identity_of(self._actor)._id
        if identity not in life.known_to:
            with life.lock:  # no other thread may make a call before `enter` is submitted
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
    ) -> Generator[Future[Any] | Until | Read, Any, CallAnswer | None]:
        """Like `_kept`, for a promise whose value is a CallAnswer."""
        code = yield from self._kept(promised, deadline)
        return None if code is None else CallAnswer(code)

    def _kept(
        self, promised: ObjectRef[Any], deadline: int
    ) -> Generator[Future[Any] | Until | Read, Any, Any]:
        """Waits for a promise. Returns its value, or None at the deadline. Raises ActorLostError if
        the actor has ended."""
        runtime = self._runtime
        if not (yield Until(runtime, promised, deadline)):
            return None
        try:
            return (yield Read(runtime, promised, False))
        except ObjectLostError as lost:
            yield self._call("ping")  # raises ActorLostError with the reason, if there is one
            raise errors.ActorLostError(f"the actor of {self!r} has lost its state") from lost


def _arrived(kind: type[H], actor: Actor, extras: tuple[Any, ...]) -> H:
    """Unpickles a handle. Pickles contain the name of this function."""
    handle = kind.__new__(kind)
    handle._actor = actor
    handle._take_extras(*extras)
    return handle


def waits(block: bool, timeout: float | None) -> tuple[bool, int]:
    """Returns whether a call with these arguments waits, and its deadline in nanoseconds."""
    check_timeout(timeout)
    return block and (timeout is None or timeout > 0), deadline_ns(timeout)
