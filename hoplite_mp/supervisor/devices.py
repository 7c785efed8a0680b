"""Tells a worker with resources which devices it may use, in the form that their libraries read.

Why it exists: such libraries read the environment once, when they are loaded; so the indices of the
resource that a worker was assigned are set before anything is imported there.
It must never know: who assigns resources.
"""

from __future__ import annotations

__all__ = ["device_environment"]

DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES"}  # resource -> the variable that names its indices


def device_environment(assigned: dict[str, list[int]]) -> dict[str, str]:
    """assigned: indices of resources that belong to a worker for life."""
    return {
        variable: ",".join(map(str, assigned[name]))
        for name, variable in DEVICES.items()
        if name in assigned
    }
