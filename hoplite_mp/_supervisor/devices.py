"""Tells a worker with resources which devices it may use, by variables that device libraries read.

Why it exists: such libraries read the environment once, when they are loaded, so the variables must
be set before anything is imported in the worker.
It must never know: how resources are assigned.
"""

from __future__ import annotations

import os

__all__ = ["device_environment"]

DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES"}  # resource -> the variable that names its indices


def device_environment(assigned: dict[str, list[int]]) -> dict[str, str]:
    """The variables for a worker. assigned: for each resource the indices of the devices that are
    the worker's for life. If this process may use only some devices, they count among these. A part
    of a device has no index, and leaves the variable as it is."""
    found = {}
    for name, variable in DEVICES.items():
        given = [one.strip() for one in os.environ.get(variable, "").split(",") if one.strip()]
        indices = assigned.get(name, ())
        if indices:
            names = (given[index] if index < len(given) else str(index) for index in indices)
            found[variable] = ",".join(names)
    return found
