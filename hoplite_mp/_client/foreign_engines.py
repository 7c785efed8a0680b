"""Brings processes that another engine has started into a cluster when they first need one.

Why it exists: a task of Ray begins in a process that this library has never seen; there `current()`
and refs among the task's arguments should work without further code. So a process without an open
cluster that has such an engine loaded asks the engine's front end before it reports an error.
It must never know: what the engine is, how it knows where the cluster is.
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["enter_by_engine"]

# Module of an engine, which its processes have imported -> its front end. The front end's `enter()`
# joins the cluster that the engine's driver has begun; False if there is none for this process.
FRONT_ENDS = {"ray": "hoplite_mp.integrations.ray._workers"}


def enter_by_engine() -> bool:
    """Asks the engines that this process has loaded to bring it into a cluster; True if one did.
    Raises the front end's error if joining that cluster failed."""
    for engine, front_end in FRONT_ENDS.items():
        if engine in sys.modules and importlib.import_module(front_end).enter():
            return True
    return False
