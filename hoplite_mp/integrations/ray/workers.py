"""A process of Ray's, when it first needs the cluster: it takes part in it.

Why it exists: `current()`, and refs among the arguments of a task, are to work in processes that
Ray makes and that nobody has prepared.
It must never know: who began the cluster.
"""

from __future__ import annotations

import ray

from hoplite_mp.integrations import beside
from hoplite_mp.integrations.ray.actors import LEADER, NAMESPACE

__all__ = ["enter"]


def enter() -> bool:
    """Takes part in the cluster beside Ray's. False: this process is no worker of Ray's, or no
    driver has called `init()`. Raises why it could not."""
    # Which kind of process this is, Ray says nowhere else; its own collectives look here, too.
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        return False
    try:
        leader = ray.get_actor(LEADER, namespace=NAMESPACE)
    except ValueError:
        return False
    beside.take_part(ray.get(leader.place.remote()))
    return True
