"""The first file that the supervisor's process runs, as a script.

Why it exists: the process must import the very package that has started it, whatever sys.path would
find first. It imports only what its children share; node and manager import the rest themselves.
It must never know: what the supervisor does.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys

PACKAGE = "hoplite_mp"


def import_package(folder: str) -> None:
    """Imports the package of this very file, whatever sys.path would find first. That is little,
    because the package imports its modules when they are needed."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def read(fd: int) -> bytes:
    """Reads the start file, which holds the length and the JSON of sys.path and then the start
    message. Sets sys.path and returns the message."""
    with open(fd, "rb") as info:
        size = int.from_bytes(info.read(8), "little")
        sys.path[:] = json.loads(info.read(size))
        return info.read()


def boot(fd: int, fresh: bool) -> None:
    """Imports the package, then runs the supervisor or, if `fresh`, a worker that is not a fork
    (fresh.py)."""
    gc.disable()  # imports make hardly any garbage; supervisor and children enable it again
    body = read(fd)
    import_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if fresh:
        from hoplite_mp.supervisor.fresh import begin

        begin(body)
        return
    import msgspec

    from hoplite_mp.protocol.local import Start
    from hoplite_mp.supervisor.main import main

    main(msgspec.msgpack.decode(body, type=Start))


if __name__ == "__main__":
    boot(int(sys.argv[1]), len(sys.argv) > 2)
