"""How do I train with the first half of the gradients, on several hosts?

`reduce(..., num=)` adds up the first gradients that are ready, in transit to the server. Their
workers start again with the new weights; the other gradients count in a later step. The server
computes new weights while the next gradients are added up.

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


class Server:
    """Holds the weights; each call computes new weights."""

    def __init__(self, weights):
        self.weights, self.record = weights, training.Record()

    def apply(self, mean):
        new = hoplite_mp.current().empty(mean.shape, np.float32)
        np.multiply(mean, -training.RATE, out=new)
        new += self.weights
        self.record.note(new)
        self.weights = new
        return new

    def accuracies(self):
        return self.record.accuracies()


def train(c, given):
    parts, half = given.hosts, given.hosts // 2
    first = c.put(training.first_weights(training.size_of(given.megabytes)))
    server = c.options(node=c.here).actor(Server, first)
    # Each host has one place: a task waits until a place is free, or a host with a place joins.
    pool = c.options(resources={"place": 1})
    running = [pool.submit(gradient, first, part, parts) for part in range(parts)]
    c.wait(running)  # wait until all workers have loaded the data
    say("begun")
    steps, end = [], time.monotonic() + given.seconds
    while not steps or steps[-1] < end:
        mean = c.reduce(running, op="mean", num=half)
        c.wait([mean])
        weights = server.apply(mean)  # not awaited: the next sum begins meanwhile
        for part in mean.contributors:
            running[part] = pool.submit(gradient, weights, part, parts)
        steps.append(time.monotonic())
    weights.result()
    say("ended")
    return {"steps": steps, "accuracy": server.accuracies().result(), "taken": half}


if __name__ == "__main__":
    given = arguments(megabytes=5, seconds=5, tls=False)
    with connect(given) as c:
        say("result", **train(c, given))
