"""Processes that another engine has made: where their cluster comes from when they first need it.

Why it exists: a task of Ray begins in a process that this library has never seen; `current()` and
refs among its arguments are to work there without another line. So a process without an open
cluster that has such an engine loaded asks the engine's front end once more before it says no.
It must never know: what the engine is, how it tells where the cluster is.
"""

from __future__ import annotations

import importlib
import sys

__all__ = ["enter_by_engine"]

# The engine's module, which its processes have imported -> the front end, with `enter()`: takes
# part in the cluster that the engine's driver has begun; False: there is none, or not for this
# process.
FRONT_ENDS = {"ray": "hoplite_mp.integrations.ray.workers"}


def enter_by_engine() -> bool:
    """Whether an engine has just brought this process into a cluster. Raises why it could not."""
    for engine, front_end in FRONT_ENDS.items():
        if engine in sys.modules and importlib.import_module(front_end).enter():
            return True
    return False
