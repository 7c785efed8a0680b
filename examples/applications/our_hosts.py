"""Our cluster: a running one, once all hosts have joined, or a new one on this host.

The first host was started with `--resources place=1`, all others with `place=1,away=1`, so that a
task that needs one of these resources has a host for itself.
"""

import time

import hoplite_mp

WAIT_S = 120


def connect(given):
    """The cluster at the address; without an address, a new one on this host."""
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
