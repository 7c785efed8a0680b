"""A cluster of ours: the running one, as soon as it has all hosts, or one here.

All hosts were started with `--resources place=1`, and all but the first with `place=1,away=1`, so
that what needs one of these has a host for itself.
"""

import time

import hoplite_mp

WAIT_S = 120


def connect(given):
    """Without an address this host has it all."""
    if given.address is None:
        n = given.hosts
        return hoplite_mp.Cluster(workers=n, resources={"place": n, "away": n - 1})
    c = hoplite_mp.Cluster(address=given.address, tls=None if given.tls else False)
    deadline = time.monotonic() + WAIT_S
    while len(c.nodes) < given.hosts:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the cluster has {len(c.nodes)} of {given.hosts} hosts")
        time.sleep(0.1)
    return c
