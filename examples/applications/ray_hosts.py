"""Connects to Ray: a running cluster, once all hosts have joined, or a new one on this host.

The first host was started with `ray start --resources='{"place": 1}'`, all others with
`{"place": 1, "away": 1}`, so that an actor that needs one of these has a host for itself.
"""

import logging
import time

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

WAIT_S = 240


def connect(given):
    """Returns when all hosts have joined; without an address, starts Ray on this host."""
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
    """Options for an actor on the driver's host."""
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
