"""What new processes inherit: multiprocessing settings, and arguments of initializers.

multiprocessing is imported only after the host's processes have been started, so that no program
waits for the import. If the program has not imported multiprocessing before, no object can depend
on the program's authkey, so it is set to the workers' authkey.

The standard library's locks, queues, pipes and shared values can only be pickled while a process is
spawned, because they contain file descriptors, or names that are valid as long as the object
exists. The arguments of an initializer are therefore pickled as if for a spawned process. Their
descriptors are numbered, and sent with the request for the pool. Each worker in the pool inherits
them, even if it is started later.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp import _serialize
from hoplite_mp._protocol.spawning import InheritedContext

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._client.runtime import Runtime

__all__ = [
    "DESCRIPTORS_MAX",
    "Inheritance",
    "Inherited",
    "forget",
    "inherited_settings_here",
    "put_setup",
    "receive",
    "share_authkey",
]


AUTHKEY_BYTES = 32


def inherited_settings_here() -> InheritedContext:
    """The settings for this program's workers."""
    process: Any = sys.modules.get("multiprocessing.process")
    context: Any = sys.modules.get("multiprocessing.context")
    key = os.urandom(AUTHKEY_BYTES) if process is None else process.current_process().authkey
    method = None
    if context is not None:
        method = context._default_context.get_start_method(allow_none=True)
    argv = [os.fsencode(word) for word in getattr(sys, "argv", ()) if isinstance(word, str)]
    return InheritedContext(
        pid=os.getpid(),
        authkey=bytes(key),
        argv=argv,
        faulthandler=faulthandler.is_enabled(),
        start_method=method or "",
    )


def share_authkey(inherited_settings: InheritedContext) -> None:
    """Sets this process's authkey to the workers' authkey if multiprocessing was not imported
    before."""
    if "multiprocessing.process" not in sys.modules:
        import multiprocessing.process

        multiprocessing.process.current_process().authkey = inherited_settings.authkey


T = TypeVar("T")
DESCRIPTORS_MAX = 200  # the kernel accepts 253 in one message
_here: list[int] = []  # descriptors that this worker has inherited


class Inherited:
    """An inherited descriptor, identified by its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        """Returns a duplicate for the caller, like `multiprocessing.reduction.DupFd.detach`."""
        return os.dup(_here[self.number])


class Inheritance:
    """A substitute for the standard library's Popen while arguments for new processes are
    pickled."""

    def __init__(self) -> None:
        self.descriptors: list[int] = []

    def duplicate_for_child(self, fd: int) -> int:
        self.descriptors.append(fd)
        return len(self.descriptors) - 1

    def DupFd(self, number: int) -> Inherited:
        return Inherited(number)

    def collected(self, pickle: Callable[[], T]) -> T:
        """Calls `pickle` as if this thread were spawning a process, and collects the descriptors to
        inherit."""
        context: Any = sys.modules.get("multiprocessing.context")
        if context is None:  # no such objects exist
            return pickle()
        before = context.get_spawning_popen()
        context.set_spawning_popen(self)
        try:
            return pickle()
        finally:
            context.set_spawning_popen(before)


def receive(descriptors: list[int]) -> None:
    """Stores the descriptors that this worker has inherited."""
    _here[:] = descriptors


def forget() -> None:
    """Closes the inherited descriptors. Called when the initializer's arguments are unpickled."""
    while _here:
        os.close(_here.pop())


def put_setup(
    runtime: Runtime,
    initializer: Callable[..., Any],
    initargs: tuple[Any, ...],
    inheritance: Inheritance | None,
) -> Any:
    """Stores the initializer and its arguments for all workers. inheritance: not None if all
    workers are on this host."""
    memory = runtime.memory
    function = _serialize.encode_function(initializer, memory.scan and memory.scan())
    if inheritance is not None and "multiprocessing.context" in sys.modules:
        try:
            ref = inheritance.collected(lambda: memory.put((function, initargs)))
        except (RuntimeError, TypeError) as error:
            if "fork context" not in str(error):
                raise
            raise TypeError(
                "initargs contain an object of multiprocessing's fork context, which only a "
                "forked process can use: create it with the spawn context, for example "
                "multiprocessing.get_context('spawn').Lock()"
            ) from error
        if len(inheritance.descriptors) > DESCRIPTORS_MAX:
            raise ValueError(
                f"initargs contain {len(inheritance.descriptors)} file descriptors: at most "
                f"{DESCRIPTORS_MAX} can be passed"
            )
        return ref
    try:
        return memory.put((function, initargs))
    except (RuntimeError, TypeError) as error:
        if "through inheritance" not in str(error):
            raise
        raise TypeError(
            f"{error}: initargs are sent by value to workers on other hosts; use a "
            "multiprocessing.Manager() that listens on the network, or workers on this host"
        ) from error
