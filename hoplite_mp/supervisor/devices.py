"""Which devices a process of its own may use, as the libraries that drive them read it.

Why it exists: such libraries look at the environment once, when they are loaded; so it says which
indices of a resource a worker has been given before anything is imported there.
It must never know: who shares out resources.
"""

from __future__ import annotations

__all__ = ["device_environment"]

DEVICES = {"gpu": "CUDA_VISIBLE_DEVICES"}  # resource -> the variable that names its indices


def device_environment(assigned: dict[str, list[int]]) -> dict[str, str]:
    """assigned: indices of resources that are a worker's for life."""
    return {
        variable: ",".join(map(str, assigned[name]))
        for name, variable in DEVICES.items()
        if name in assigned
    }
