"""Program of the experiment `repetition`: logistic regression on all flights, one step at a time.

A host that is late begins its gradient later. Its CPU is capped: a gradient that takes w seconds of
CPU takes w / share seconds.
"""

import contextlib
import functools
import time

import numpy as np

from examples.applications.nycflights import load
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from hoplite_mp import NodeLostError, ml

RATE, WARM_UP = 1.0, 2


@functools.cache
def shard(number, of, rows):
    """Read once in each worker."""
    x, late, _ = load("carrier")
    x, late = x[:rows], late[:rows]
    return x[number::of].copy(), late[number::of].copy()


def loss_gradient(params, shards, given, late_s):
    """The sums of the gradient and, as the last element, of the loss; capped to a share of CPU."""
    data = [shard(number, given.hosts, given.rows) for number in shards]
    begun, cpu = time.monotonic(), time.thread_time()
    time.sleep(late_s)
    total = np.zeros(len(params) + 1)
    for x, late in data:
        margin = x @ params
        error = 1 / (1 + np.exp(-margin)) - late
        total += np.append(x.T @ error, np.logaddexp(0, margin).sum() - margin[late].sum())
    used = time.thread_time() - cpu
    time.sleep(max(0.0, late_s + used / given.share - (time.monotonic() - begun)))
    return total


def late_rank(given, step):
    """The seeded rank that is late in that step, or -1."""
    if given.late_s == 0 or step < 0:
        return -1
    return int(np.random.default_rng([given.seed, step]).integers(given.hosts))


def reduced(c, given, tasks, ranks):
    """The ref of the step's sum."""
    if given.way != "coded":
        num = len(tasks) - (given.way == "first")
        return c.reduce(tasks, num=num, reproducible=True)
    places = {rank: at for at, rank in enumerate(ranks)}
    groups = ml.Repetition(given.hosts, given.s).groups
    one_of = [[places[rank] for rank in group if rank in places] for group in groups]
    return c.reduce(tasks, one_of=one_of, reproducible=True)


def main(given, c):
    nodes = [node for node in c.nodes if node.workers]
    code = ml.Repetition(given.hosts, given.s)
    params, losses, begun = np.zeros(13), [], 0.0
    for step in range(-WARM_UP, given.steps):
        if step == 0:
            say("begun")
            params, losses, begun = np.zeros(13), [], time.monotonic()
        late, tasks, ranks = late_rank(given, step), [], []
        for rank, node in enumerate(nodes):
            shards = code.shards(rank) if given.way == "coded" else (rank,)
            late_s = given.late_s if rank == late else 0.0
            with contextlib.suppress(NodeLostError):  # at the submission: its host has been killed
                at = c.options(node=node, retries=0)
                tasks.append(at.submit(loss_gradient, params, shards, given, late_s))
                ranks.append(rank)
        total = reduced(c, given, tasks, ranks)
        value = c.get(total)
        if given.way == "first":  # an estimate from the shards that are there
            value = value * given.hosts / len(total.contributors)
        if step < 0:
            c.wait(tasks)  # every worker has read its shards
        for task in tasks:
            task.cancel(force=True)  # late ones begin the next step with the others
        params, losses = params - RATE * value[:-1] / given.rows, [*losses, value[-1] / given.rows]
    seconds = time.monotonic() - begun
    say("ended")
    say("result", losses=losses, step_s=seconds / given.steps)


if __name__ == "__main__":
    given = arguments(
        way="coded", s=1, steps=40, late_s=0.0, share=0.05, rows=336_776, seed=0, tls=False
    )
    with connect(given) as c:
        main(given, c)
