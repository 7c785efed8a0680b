"""A mixture of Gaussians on Fashion-MNIST by one way of collecting: see `arguments`.

A block takes the same time on every host but the slow one: the rest of it is slept, so that the
hosts of one machine do not compete for its processors.
"""

import socket
import time

import numpy as np

from examples.applications import fashion_mnist, our_hosts
from examples.applications.running import arguments, say
from hoplite_mp import ml
from hoplite_mp._api.cluster import current
from hoplite_mp.ml._cluster_sums import MixtureUpdate, mixture_sums
from hoplite_mp.ml._proactive import _blocks

FEATURES, COMPONENTS = 10, 10
SAMPLE = 10_000  # rows of which the likelihood of every state is computed
UPDATE = MixtureUpdate(1e-6)


def sums_in_time(state, rows):
    """`mixture_sums`, in the time that a block takes."""
    seconds, slow = state[3]
    begun = time.monotonic()
    found = mixture_sums(state[:3], rows)
    seconds *= slow if socket.gethostname() == "h8" else 1
    time.sleep(max(0.0, begun + seconds - time.monotonic()))
    return found


def update(state, sums, rows):
    return (*UPDATE(None, sums, rows), state[3])


def minibatch(rank, name, size, state, shard, block, passes):
    """Bulk-synchronous: each step is one block on every rank, an allreduce, and the update."""
    history, latest, done = [], {}, 0.0
    blocks = list(_blocks(shard, block))
    shapes = [(COMPONENTS,), (COMPONENTS, FEATURES), (COMPONENTS, FEATURES, FEATURES)]
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    with current().group(name, size, rank) as group:
        group.barrier()
        begun = time.monotonic()
        while done < passes:
            number = len(history) % len(blocks)
            loss, sums = sums_in_time(state, blocks[number][1])
            flat = [one.ravel() for one in sums]
            latest[number] = np.concatenate([*flat, [loss, blocks[number][0]]])
            total = group.allreduce(sum(latest.values()))
            parts = np.split(total[: ends[-1]], ends[:-1])
            shaped = tuple(one.reshape(s) for one, s in zip(parts, shapes, strict=True))
            state = update(state, shaped, round(total[-1]))
            done += 1 / len(blocks)
            history.append((time.monotonic() - begun, total[-2] / total[-1], state))
    return history


def likelihoods(history, rows):
    """(seconds, mean log-likelihood of the sample) of at most 80 states."""
    chosen = sorted({round(i) for i in np.geomspace(1, len(history), 80)})
    found = [(history[i - 1][0], history[i - 1][2]) for i in chosen]
    return [(t, -mixture_sums(state[:3], rows)[0] / len(rows)) for t, state in found]


def main():
    given = arguments(
        tls=False, way="auto", block=500, seconds=0.025, slow=1.0, passes=40.0, seed=0, rows=60_000
    )
    x = fashion_mnist.load("train")[0][: given.rows].astype(np.float32) / 255
    x -= x.mean(axis=0)
    x = (x @ np.linalg.eigh(x.T @ x)[1][:, -FEATURES:]).astype(float)
    rng = np.random.default_rng(given.seed)
    first = x[rng.choice(len(x), COMPONENTS, replace=False)]
    factors = np.stack([np.eye(FEATURES) / x.std()] * COMPONENTS)
    state = (np.full(COMPONENTS, 1 / COMPONENTS), first, factors, (given.seconds, given.slow))
    sample = x[rng.choice(len(x), min(SAMPLE, len(x)), replace=False)]
    with our_hosts.connect(given) as c:
        shards = [c.put(part) for part in np.array_split(x, given.hosts)]
        say("begun")
        if given.way == "minibatch":
            name = f"minibatch-{time.monotonic()}"
            view = c.options(resources={"place": 1})
            members = [
                view.submit(
                    minibatch, rank, name, given.hosts, state, shard, given.block, given.passes
                )
                for rank, shard in enumerate(shards)
            ]
            history, period = members[0].result(), None
        else:
            period = None if given.way == "passes" else "auto"
            found = ml.proactive(
                sums_in_time, shards, update, state, period,
                block=given.block, passes=given.passes, tol=-np.inf, states=True,
            )  # fmt: skip
            history, period = found.history, found.period
        say("ended")
        curve = likelihoods(history, sample)
    say("result", curve=curve, period=period, updates=len(history))


if __name__ == "__main__":
    main()
