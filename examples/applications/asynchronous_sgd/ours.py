"""How do I train with the first half of the gradients, on several hosts?

`reduce(..., num=)` adds up the gradients that are ready first, on their way to the server. Their
workers begin again with the new weights; the others go on, and count in a later step.

Needs: torch
"""

import time

import numpy as np

import hoplite_mp
from examples.applications.asynchronous_sgd import training
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say


def gradient(weights, part, parts):
    out = hoplite_mp.current().empty(weights.shape, np.float32)
    return training.learner().gradient(weights, part, parts, out)


def stepped(c, weights, mean):
    new = c.empty(weights.shape, np.float32)
    np.multiply(mean, -training.RATE, out=new)
    new += weights
    return new


def train(c, given):
    parts, half = given.hosts, given.hosts // 2
    weights, record = training.first_weights(training.size_of(given.megabytes)), training.Record()
    # Each host has one place: a task that finds none waits, also for a new host.
    pool, now = c.options(resources={"place": 1}), c.put(weights)
    running = [pool.submit(gradient, now, part, parts) for part in range(parts)]
    c.wait(running)  # all workers have the data
    say("begun")
    steps, end = [], time.monotonic() + given.seconds
    while not steps or steps[-1] < end:
        mean = c.reduce(running, op="mean", num=half)
        weights = stepped(c, weights, c.get(mean))
        now = c.put(weights)
        for part in mean.contributors:
            running[part] = pool.submit(gradient, now, part, parts)
        record.note(weights)
        steps.append(time.monotonic())
    say("ended")
    return {"steps": steps, "accuracy": record.accuracies(), "taken": half}


if __name__ == "__main__":
    given = arguments(megabytes=5, seconds=5, tls=False)
    with connect(given) as c:
        say("result", **train(c, given))
