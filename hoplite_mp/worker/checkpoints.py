"""Checkpoints of an actor: its state is kept outside of its process after every k calls.

Why it exists: a process that begins again goes on with the state that was kept last. With the state
go the results of calls whose callers may not have them yet, by the calls' numbers: a call that is
tried again, and is in the kept state already, is answered with its first result and not applied a
second time. The next call begins only when the node has said that the state is kept.
It must never know: on which hosts states are kept, how calls travel, who restarts a process.
"""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import serial
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.protocol.actors import ActorStateAsked, KeepActorState
from hoplite_mp.protocol.local import Imported
from hoplite_mp.worker import actor

if TYPE_CHECKING:
    import asyncio

    from hoplite_mp.client.actors import ActorSetup, CallNumber
    from hoplite_mp.client.functions import Exceptions
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["begin", "call"]

# Processes whose results are kept with the state; of more, those that have not called for longest
# are forgotten, and a call of theirs that is tried again is applied again. 100 bytes for each, and
# its results.
CALLERS_MAX = 4096

_checkpoints: dict[int, Checkpoints] = {}  # by this process's id, as in worker/actor.py


class Checkpoints:
    """Of this process's object."""

    def __init__(self, runtime: Runtime, every: int) -> None:
        self.runtime = runtime
        self.every = every
        self.again: Exceptions = ()  # what a call raises that is tried again after it
        self.since = 0  # calls since the last one
        # Caller -> number of the call -> did it fail, its payload, the refs inside that.
        self.results: dict[bytes, dict[int, tuple[bool, bytes, list[ObjectRef[Any]]]]] = {}
        self.kept: ObjectRef[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of its async methods

    def note(self, number: CallNumber, failed: bool, value: Any) -> None:
        """What that call has given, or raised."""
        if failed:
            encoded = serial.encode_error(value, None)
        else:
            encoded = serial.encode(value, self.runtime.memory.keep)
        caller, turn, seen = number
        mine = self.results.pop(caller, {})
        mine = {other: result for other, result in mine.items() if other >= seen}
        mine[turn] = failed, encoded.tobytes(), list(encoded.refs)
        self.results[caller] = mine
        while len(self.results) > CALLERS_MAX:
            del self.results[next(iter(self.results))]

    def known(self, number: CallNumber) -> tuple[bool, Any] | None:
        """Its first result, if it has been applied before."""
        found = self.results.get(number.caller, {}).get(number.turn)
        if found is None:
            return None
        failed, payload, _ = found
        make_ref = self.runtime.memory.make_ref
        if failed:
            return True, serial.decode_error(memoryview(payload), make_ref)
        return False, serial.decode(memoryview(payload), make_ref=make_ref, writable=True)

    def ended(self, value: Any) -> Any:
        """The result of a call; a coroutine runs to its end, because the state must not change
        while it is kept."""
        if not inspect.iscoroutine(value):
            return value
        if self._loop is None:
            import asyncio

            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(value)

    def count_one(self) -> None:
        """Another call has been applied; keeps the state when its turn has come."""
        self.since += 1
        if self.since < self.every:
            return
        made = actor.made()
        try:
            state = self.runtime.memory.put((made, self.results))
        except serial.NotPicklable as error:
            what = f"the state of a {type(made).__name__}, which options(checkpoint=) is to keep"
            why = f"{what}, does not pickle: {error.__cause__ or error}"
            raise serial.reworded(error.reason, why) from error
        self.runtime.channel.call(KeepActorState(self.runtime.memory.local_id(state)))
        self.since, self.kept = 0, state


def begin(runtime: Runtime, setup: ActorSetup) -> None:
    """This process's object: from its last kept state, or from its constructor."""
    checkpoints = Checkpoints(runtime, setup.checkpoint)
    checkpoints.again = serial.decode_function(setup.again) if setup.again else ()
    _checkpoints[os.getpid()] = checkpoints
    reply = runtime.channel.call(ActorStateAsked())
    if not reply.value:
        actor.make(runtime, setup)
        return
    hold = runtime.memory.client.hold(reply.value)
    runtime.channel.tell(Imported(reply.number))
    made, checkpoints.results = runtime.memory.read(reply.value, FOREVER_NS, True)
    del hold
    actor.take(made)


def call(number: CallNumber, method: str, /, *args: Any, **kwargs: Any) -> Any:
    """What a handle of an actor with checkpoints submits."""
    checkpoints = _checkpoints.get(os.getpid())
    if checkpoints is None:
        return actor.call(method, *args, **kwargs)  # which says why not
    known = checkpoints.known(number)
    if known is None:
        failed, value = False, None
        try:
            value = checkpoints.ended(actor.call(method, *args, **kwargs))
        except Exception as error:
            if isinstance(error, checkpoints.again):
                raise  # as if its process had died: it was not applied
            failed, value = True, error
        try:
            checkpoints.note(number, failed, value)
        except Exception as error:  # it does not pickle
            failed, value = True, error
            checkpoints.note(number, failed, value)
        checkpoints.count_one()
    else:
        failed, value = known
    if failed:
        raise value
    return value
