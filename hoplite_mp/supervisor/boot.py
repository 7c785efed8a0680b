"""The first file that the supervisor's process runs, as a script.

Why it exists: the process must import the package that has started it, wherever sys.path leads, and
of it only what its children share; node and manager import the rest themselves.
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
    """Imports the package of this very file, wherever sys.path leads. It imports almost nothing."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[folder]
    )
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def boot(fd: int, fresh: bool) -> None:
    """Reads what launch wrote: length and JSON of sys.path, then the start message. fresh: this is
    a worker that is not a fork (see fresh.py)."""
    gc.disable()  # imports make hardly any garbage; supervisor and children enable it again
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
