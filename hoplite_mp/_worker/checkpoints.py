"""Checkpoints of an actor: saves its state outside its process after every k calls.

A restarted process continues with the last saved state. Results that may not have reached their
callers are saved with the state, by call number. If a call is retried and the saved state contains
the call's effect, the call returns its first result, and is not applied twice. After a save, the
next call begins only when the node has confirmed the save.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._protocol.actors import LoadActorState, SaveActorState
from hoplite_mp._protocol.local import Imported
from hoplite_mp._worker import actor
from hoplite_mp.errors import StateNotSavedError, StoreFullError

if TYPE_CHECKING:
    import asyncio

    from hoplite_mp._client.actors import ActorSetup, CallNumber
    from hoplite_mp._client.functions import Exceptions
    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef

__all__ = ["begin", "call"]

# Maximum number of calling processes whose results are saved with the state. The results for the
# process with the oldest last call are dropped first; if one of that process's calls is retried,
# the call is applied again. Each process needs 100 bytes, and space for its results.
CALLERS_MAX = 4096

_checkpoints: dict[int, Checkpoints] = {}  # pid -> checkpoints, as in _worker/actor.py


class Checkpoints:
    """The checkpoints of this process's object."""

    def __init__(self, runtime: Runtime, every: int) -> None:
        self.runtime = runtime
        self.every = every
        self.again: Exceptions = ()  # exceptions after which a call is retried
        self.since = 0  # calls since the last checkpoint
        # Caller -> number of the call -> (whether it failed, result payload, refs inside the
        # payload).
        self.results: dict[bytes, dict[int, tuple[bool, bytes, list[ObjectRef[Any]]]]] = {}
        self.kept: ObjectRef[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # for the actor's async methods

    def note(self, number: CallNumber, failed: bool, value: Any) -> None:
        """Records a call's result or error."""
        if failed:
            encoded = _serialize.encode_error(value, None)
        else:
            encoded = _serialize.encode(value, self.runtime.memory.scan)
        caller, turn, seen = number
        recent = self.results.pop(caller, {})
        recent = {other: result for other, result in recent.items() if other >= seen}
        recent[turn] = failed, encoded.tobytes(), list(encoded.refs)
        self.results[caller] = recent
        while len(self.results) > CALLERS_MAX:
            del self.results[next(iter(self.results))]

    def known(self, number: CallNumber) -> tuple[bool, Any] | None:
        """(whether the call failed, its value) for a call that was applied before; None if the call
        was not applied."""
        found = self.results.get(number.caller, {}).get(number.turn)
        if found is None:
            return None
        failed, payload, _ = found
        memory, mem = self.runtime.memory, memoryview(payload)
        if failed:
            return True, _serialize.decode_error(mem, memory.make_ref)
        return False, memory.decode_value(mem, "the result of a call", True)

    def ended(self, value: Any) -> Any:
        """Returns a call's result. If the call has returned a coroutine, it is first run to its
        end, because the state must not change during a save."""
        if not inspect.iscoroutine(value):
            return value
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    def save(self, method: str) -> None:
        """Saves the state after a call if k calls have been applied since the last save."""
        if self.since < self.every:
            return
        made = actor.made()
        name = type(made).__name__
        try:
            state = self.runtime.memory.put((made, self.results))
        except StoreFullError as error:
            raise StateNotSavedError(
                f"{name}.{method}() has taken effect, but the state after it could not be saved: "
                f"{error}. Do not repeat the call, because it would be applied twice. The next "
                "call saves the state if there is space; if the process dies before that, all "
                "changes since the last save are lost. Free arrays and refs, or raise memory="
            ) from error
        except _serialize.NotPicklable as error:
            what = f"the state of a {name}, which options(checkpoint=) saves"
            cause = _serialize.text_of(_serialize.failure_within(error))
            why = f"{what}, does not pickle: {cause} ({method}() has taken effect)"
            raise _serialize.reworded(error.reason, why) from error
        self.runtime.channel.call(SaveActorState(self.runtime.memory.local_id(state)))
        self.since, self.kept = 0, state


def begin(runtime: Runtime, setup: ActorSetup) -> None:
    """Creates this process's object from the last saved state, or by calling its constructor."""
    checkpoints = Checkpoints(runtime, setup.checkpoint)
    checkpoints.again = _serialize.decode_function(setup.again) if setup.again else ()
    _checkpoints[os.getpid()] = checkpoints
    reply = runtime.channel.call(LoadActorState())
    if not reply.value:
        actor.make(runtime, setup)
        return
    hold = runtime.memory.client.hold(reply.value)
    runtime.channel.tell(Imported(reply.number))
    made, checkpoints.results = runtime.memory.read(reply.value, FOREVER_NS, True)
    del hold
    actor.take(made)


def call(number: CallNumber, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """The function that is submitted by the handle of an actor with checkpoints."""
    checkpoints = _checkpoints.get(os.getpid())
    if checkpoints is None:
        return actor.call(method, *args, **kwargs)  # raises the error with the reason
    known = checkpoints.known(number)
    if known is None:
        failed, value = False, None
        try:
            value = checkpoints.ended(actor.call(method, *args, **kwargs))
        except Exception as error:
            if isinstance(error, checkpoints.again):
                raise  # the call counts as not applied, as if the process had died
            failed, value = True, error
        try:
            checkpoints.note(number, failed, value)
        except Exception as error:  # the value cannot be pickled
            failed, value = True, error
            checkpoints.note(number, failed, value)
        checkpoints.since += 1
    else:
        failed, value = known
    checkpoints.save(method)
    if failed:
        raise value
    return value
