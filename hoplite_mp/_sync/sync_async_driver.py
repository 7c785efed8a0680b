"""One piece of code for threads, which may block, and for event loops, which must not.

Each method of a queue or a lock is a few calls of an actor with a wait between them, and each of
these may be interrupted, by Ctrl-C or by a cancelled `await`. The method is written once, as a
generator that yields what it waits for: `run` blocks for that, `run_async` awaits it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from hoplite_mp._client.deadlines import FOREVER_NS
from hoplite_mp._client.futures import Future
from hoplite_mp._common import clock

if TYPE_CHECKING:
    from collections.abc import Generator

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["Read", "Until", "run", "run_async"]

T = TypeVar("T")


class Until(NamedTuple):
    """Waits until the object is done, or until the deadline (of the monotonic clock). Gives whether
    the object is done."""

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
    """Reads the value of the object."""

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
    """Runs the steps in this thread, and returns what the generator returns."""
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
    """Runs the steps in the running event loop, and returns what the generator returns."""
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
