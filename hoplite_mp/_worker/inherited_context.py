"""Applies the settings that spawned processes inherit to a worker, which is forked from a template.

`_protocol/spawning.py` lists these settings. The multiprocessing settings are applied when user
code first imports multiprocessing: the import costs 1.5 ms, and most workers never need it.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import os
import sys
from typing import TYPE_CHECKING, Any

from hoplite_mp import _serialize
from hoplite_mp._client.descriptors import lift

if TYPE_CHECKING:
    from hoplite_mp._protocol.spawning import InheritedContext

__all__ = ["take_after"]

MODULE = "multiprocessing.context"  # this module imports multiprocessing.process first


def take_after(inherited_settings: InheritedContext, number: int) -> None:
    """Applies `inherited_settings` to this worker. number: the worker's number, at least 1."""
    sys.argv[:] = [os.fsdecode(word) for word in inherited_settings.argv]
    if inherited_settings.faulthandler and not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    if MODULE in sys.modules:
        _apply(inherited_settings, number)
    else:
        sys.meta_path.insert(0, _Finder(inherited_settings, number))


class _Finder:
    """Intercepts the import of one module, once."""

    def __init__(self, inherited_settings: InheritedContext, number: int) -> None:
        self.inherited_settings, self.number = inherited_settings, number

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            _apply(self.inherited_settings, self.number)

        loader.exec_module = exec_module
        return spec


def _apply(inherited_settings: InheritedContext, number: int) -> None:
    """Sets up multiprocessing as in a spawned process."""
    context: Any = sys.modules[MODULE]
    process: Any = sys.modules["multiprocessing.process"]
    me = process.current_process()
    me.authkey = inherited_settings.authkey
    me._name = f"SpawnProcess-{number}"
    me._identity = (number,)
    me._parent_pid = inherited_settings.pid
    driver = lift(_end_of(inherited_settings.pid))  # becomes readable when the program has exited
    process._parent_process = process._ParentProcess("MainProcess", inherited_settings.pid, driver)
    # A start method that a library (such as loky) has added to the program does not exist here.
    if inherited_settings.start_method in context._default_context.get_all_start_methods():
        context._default_context.set_start_method(inherited_settings.start_method, True)
    _serialize.refuse_in_children(context, process)


def _end_of(pid: int) -> int:
    """A descriptor that becomes readable when that process has exited."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:  # the process has already exited, and this worker will exit soon
        read, write = os.pipe()
        os.close(write)
        return read
