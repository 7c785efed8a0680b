"""Lets a process of Ray's take part in the cluster when it first needs it.

`current()`, and refs among the arguments of a task, must work in processes that Ray starts, without
any preparation there.
"""

from __future__ import annotations

import ray

from hoplite_mp.integrations._sidecar import sidecar
from hoplite_mp.integrations.ray._actors import LEADER, NAMESPACE

__all__ = ["enter"]


def enter() -> bool:
    """Takes part in the cluster beside Ray's. False: this process is not a worker of Ray's, or no
    driver has called `init()`. Raises the reason if it cannot take part."""
    # Ray has no public function for the kind of a process; its own collectives look here, too.
    if ray._private.worker.global_worker.mode != ray.WORKER_MODE:
        return False
    try:
        leader = ray.get_actor(LEADER, namespace=NAMESPACE)
    except ValueError:
        return False
    sidecar.take_part(ray.get(leader.place.remote()))
    return True
