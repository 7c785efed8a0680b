"""Creates an actor's object in the actor's process, and calls its methods.

A call to an actor is a task whose function is `call` and whose first argument is the method's name.
The object itself is never sent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._common.clock import FOREVER_NS

if TYPE_CHECKING:
    from hoplite_mp._client.actors import ActorSetup
    from hoplite_mp._client.runtime import Runtime

__all__ = ["call", "made", "make", "take"]

_made: dict[int, Any] = {}  # pid -> object, so that a forked child has no object


def call(method: str, /, *args: Any, **kwargs: Any) -> Any:
    """The function that a handle submits. Calls a method of this process's object."""
    found = _made.get(os.getpid())
    if found is None:
        raise RuntimeError("there is no actor in this process: user code has forked it")
    return getattr(found, method)(*args, **kwargs)


def made() -> Any:
    """This process's object."""
    return _made[os.getpid()]


def take(found: Any) -> None:
    """Sets this process's object to `found`, which was read from an earlier process's
    checkpoint."""
    _made[os.getpid()] = found


def make(runtime: Runtime, setup: ActorSetup) -> None:
    """Waits for the refs among the constructor's arguments, and runs the constructor."""
    constructor, carried = _serialize.decode_with_carried(setup.constructor)
    carried.check()
    memory = runtime.memory
    try:
        args, kwargs = _serialize.decode_call(
            memory.payload(memory.local_id(setup.arguments), FOREVER_NS),
            make_ref=memory.make_ref,
            resolve=lambda ref: memory.read(memory.local_id(ref), FOREVER_NS, setup.copy),
            writable=True,
        )
    except BaseException as error:
        name = getattr(constructor, "__name__", "the constructor")
        made = memory.call_not_loaded(error, f"the arguments of {name}()")
        if made is error:
            raise
        raise made from _serialize.cause_of(made)
    _made[os.getpid()] = constructor(*args, **kwargs)
