"""The first file that the supervisor's process runs, as a script.

Why it exists: importing the package the usual way would import its whole face before anything else
happens. Here the package is put in place unexecuted, so that node and manager can be forked after a
few modules and import what they need on another core, while this process imports numpy for the
workers. In a worker the face is executed when user code first asks for one of its names.
It must never know: what the supervisor does.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import threading
import types
from typing import Any

PACKAGE = "hoplite_mp"


class Unexecuted(types.ModuleType):
    """The package before its __init__ has run: submodules import as ever, public names run it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__dict__["_submodules"]:
            raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        if self.__dict__["_executing"] != threading.get_ident():
            self._execute()
        return types.ModuleType.__getattribute__(self, name)

    def _execute(self) -> None:
        """Once, while other threads wait. What breaks it off, a task that is interrupted say,
        leaves the package as it was, so the next one who asks executes it."""
        with self.__dict__["_lock"]:
            if type(self) is not Unexecuted:
                return  # another thread has, meanwhile
            spec = self.__spec__
            assert spec is not None
            assert spec.loader is not None
            self.__dict__["_executing"] = threading.get_ident()
            try:
                spec.loader.exec_module(self)
                self.__class__ = types.ModuleType  # type: ignore[assignment]
            finally:
                self.__dict__["_executing"] = None


def place_package(folder: str) -> None:
    """Puts the package into sys.modules without executing it."""
    init = os.path.join(folder, "__init__.py")
    spec = importlib.util.spec_from_file_location(
        PACKAGE, init, submodule_search_locations=[folder]
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__dict__["_submodules"] = {entry.split(".")[0] for entry in os.listdir(folder)}
    module.__dict__["_executing"] = None  # the thread that does
    module.__dict__["_lock"] = threading.Lock()
    module.__class__ = Unexecuted
    sys.modules[PACKAGE] = module


def boot(fd: int, fresh: bool) -> None:
    """Reads what launch wrote: length and JSON of sys.path, then the start message. fresh: of a
    worker that is no fork (see fresh.py)."""
    gc.disable()  # imports make no garbage worth looking for; supervisor and children enable it
    with open(fd, "rb") as info:
        size = int.from_bytes(info.read(8), "little")
        sys.path[:] = json.loads(info.read(size))
        body = info.read()
    place_package(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
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
