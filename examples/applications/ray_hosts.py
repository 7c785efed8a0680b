"""Ray, as soon as it has all hosts, or here.

The hosts were started with `ray start --resources='{"place": 1}'`, and all but the first with
`{"place": 1, "away": 1}`, so that what needs one of these has a host for itself.
"""

import logging
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

WAIT_S = 240


def connect(given):
    """Returns when there are as many nodes as hosts; without an address, this host is all."""
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if given.address is None:
        here = {"place": given.hosts, "away": given.hosts - 1}
        ray.init(num_cpus=given.hosts, resources=here, **quiet)
        return
    ray.init(address=given.address, _node_ip_address=given.address.partition(":")[0], **quiet)
    deadline = time.monotonic() + WAIT_S
    while sum(node["Alive"] for node in ray.nodes()) < given.hosts:
        if time.monotonic() > deadline:
            raise TimeoutError(f"Ray has not {given.hosts} nodes")
        time.sleep(0.2)


def here():
    """Options of an actor that is to be beside the driver."""
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
