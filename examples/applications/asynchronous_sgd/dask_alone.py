"""The same on Dask alone: the server's worker gets futures of gradients as they are done.

`as_completed` yields the first gradients that are ready; the step is a task on the server's host,
and arrays are sent from worker to worker, not through this process.

Needs: distributed, torch
"""

import time

import numpy as np
from distributed import as_completed, wait

from examples.applications.asynchronous_sgd import training
from examples.applications.dask_hosts import connect
from examples.applications.running import arguments, say


def gradient(weights, part, parts):
    out = np.zeros(weights.shape, np.float32)
    return training.learner().gradient(weights, part, parts, out)


def apply(weights, gradients):
    new = training.stepped(weights, gradients)
    training.record().note(new)
    return new


def accuracies(last_weights):
    return training.record().accuracies()


def train(client, workers, given):
    server, parts = workers[0], given.hosts

    def begin(part):
        future = client.submit(gradient, weights, part, parts, workers=workers[part], pure=False)
        part_of[future] = part
        return future

    size, part_of = training.size_of(given.megabytes), {}
    weights = client.submit(training.first_weights, size, workers=server)
    half = parts // 2
    begun = [begin(part) for part in range(parts)]
    wait(begun)  # wait until all workers have loaded the data
    ready = as_completed(begun)
    del begun
    say("begun")
    steps, end = [], time.monotonic() + given.seconds
    while not steps or steps[-1] < end:
        gradients = [next(ready) for _ in range(half)]
        weights = client.submit(apply, weights, gradients, workers=server)
        for part in [part_of.pop(future) for future in gradients]:
            ready.add(begin(part))
        steps.append(time.monotonic())
    wait(weights)
    say("ended")
    found = client.submit(accuracies, weights, workers=server).result()
    return {"steps": steps, "accuracy": found, "taken": half}


if __name__ == "__main__":
    given = arguments(megabytes=5, seconds=5)
    client, workers = connect(given)
    say("result", **train(client, workers, given))
    client.shutdown()
