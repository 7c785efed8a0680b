"""The first file that the supervisor's process runs, as a script.

Why it exists: the process is to import the package that has started it, whatever sys.path leads
to, and of it only what its children share: node and manager import the rest by themselves.
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
    """The package of this very file, whatever sys.path leads to. It imports next to nothing."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def boot(fd: int, fresh: bool) -> None:
    """Reads what launch wrote: length and JSON of sys.path, then the start message. fresh: of a
    worker that is no fork (see fresh.py)."""
    gc.disable()  # imports make no garbage worth looking for; supervisor and children enable it
    with open(fd, "rb") as info:
        size = int.from_bytes(info.read(8), "little")
        sys.path[:] = json.loads(info.read(size))
        body = info.read()
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
