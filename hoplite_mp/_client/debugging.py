"""Tasks of `Cluster(debug=True)`: each runs at the call, in the calling process.

pdb, coverage and profilers see such a task as part of the program. Its result is stored as an
object, as any task's, so that it must pickle and is read-only. Its exception is raised as itself.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._client.functions import FrozenFunction, is_async
from hoplite_mp._client.futures import Future
from hoplite_mp._client.option_checks import retry_pause
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.object_states import KIND_OPERATION, STATE
from hoplite_mp._common.ref import ByRef, ObjectRef

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hoplite_mp._client.option_checks import RetryDelay
    from hoplite_mp._client.submitter import Submitter

__all__ = ["run_here"]


def run_here(
    submitter: Submitter,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    copy: bool,
    retries: int,
    delay: RetryDelay | None,
) -> Future[Any]:
    """Runs the task, and returns its Future, which is done. retries: how often it is tried again
    after one of the exceptions of a FrozenFunction. delay: the pauses before these tries."""
    memory = submitter.memory

    def get(ref: Any) -> Any:
        one = ref.ref if isinstance(ref, Future) else ref
        return memory.read(memory.local_id(one), FOREVER_NS, copy)

    again: tuple[type[Exception], ...] = ()
    if isinstance(fn, FrozenFunction):
        fn, again = fn.fn, fn.again
    for tries in range(retries + 1):
        if tries and delay is not None:
            clock.sleep(retry_pause(delay, tries))
        try:
            values = [_resolved(one, get) for one in args]
            named = {name: _resolved(one, get) for name, one in kwargs.items()}
            value = _call(fn, values, named)
            encoded = _serialize.encode(value, memory.keep)
        except again as error:
            if tries == retries:
                return submitter.fail_at_once(error, copy)
        except KeyboardInterrupt:  # Ctrl-C of the user
            raise
        except BaseException as error:
            return submitter.fail_at_once(memory.to_raise(error), copy)
        else:
            return _succeed(submitter, encoded, copy)
    raise AssertionError("the last try returns")


def _succeed(submitter: Submitter, encoded: _serialize.Encoded, copy: bool) -> Future[Any]:
    client = submitter.client
    oid = client.new(KIND_OPERATION, STATE["CLAIMED"], client.slot, 0)
    future: Future[Any] = Future(submitter, oid, client.hold(oid, False), copy)
    submitter.expect(oid, future, None)
    submitter.store_result(oid, encoded, False)
    submitter.ended(oid)
    return future


def _resolved(value: Any, get: Callable[[Any], Any]) -> Any:
    """The argument with values in the place of refs and Futures, as a worker receives it."""
    kind = type(value)
    if kind is ByRef:
        return value.value
    if isinstance(value, (ObjectRef, Future)):
        return get(value)
    if kind in (list, tuple, set):
        return kind([_resolved(one, get) for one in value])
    if kind is dict:
        return {key: _resolved(one, get) for key, one in value.items()}
    return value


def _call(fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if not is_async(fn):
        return fn(*args, **kwargs)
    import asyncio

    if asyncio._get_running_loop() is None:
        return asyncio.run(fn(*args, **kwargs))
    ended: list[Any] = []  # the caller's event loop waits, as for a plain function

    def run() -> None:
        try:
            ended.append((asyncio.run(fn(*args, **kwargs)), None))
        except BaseException as error:
            ended.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = ended.pop()
    if error is not None:
        raise error
    return value
