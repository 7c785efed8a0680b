"""The script that starts the supervisor and workers that are not forks.

The new process must import the same copy of the package as its parent, regardless of sys.path.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp._protocol.local import Start

PACKAGE = "hoplite_mp"


def import_package(folder: str) -> None:
    """Imports the package that contains this file, regardless of sys.path. The package imports its
    modules lazily."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the program has already printed the warnings
        spec.loader.exec_module(module)


def read(fd: int) -> bytearray:
    """Reads the start file: sys.path as JSON, preceded by its length, and the start message. Sets
    sys.path, and returns the message."""
    with open(fd, "rb", buffering=0) as info:  # a memfd: reads are never short
        size = int.from_bytes(info.read(8), "little")
        sys.path[:] = json.loads(info.read(size))
        message = bytearray(os.fstat(fd).st_size - info.tell())
        info.readinto(message)
        return message


def decode(body: bytearray) -> Start:
    """Decodes the start message, and overwrites its bytes, because they contain the cluster's key,
    and children would inherit this copy."""
    import msgspec

    from hoplite_mp._protocol.local import Start
    from hoplite_mp._protocol.secret import decode_secret

    start = msgspec.msgpack.decode(body, type=Start, dec_hook=decode_secret)
    body[:] = bytes(len(body))
    return start


def boot(fd: int, fresh: bool) -> None:
    """Imports the package, then runs the supervisor or, if `fresh`, a worker that is not a fork
    (exec_worker.py)."""
    gc.disable()  # imports create hardly any garbage; the supervisor and children enable it again
    body = read(fd)
    import_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if fresh:
        from hoplite_mp._supervisor.exec_worker import begin

        begin(body)
        return
    from hoplite_mp._supervisor.main import main

    main(decode(body))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the program handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    boot(int(sys.argv[1]), len(sys.argv) > 2)
