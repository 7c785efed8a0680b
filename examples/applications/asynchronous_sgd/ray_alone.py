"""The same on Ray alone, like Ray's own example of an asynchronous parameter server.

`ray.wait` returns the first gradients that are ready; the server, an actor, takes all of them.

Needs: ray, torch
"""

import time

import numpy as np
import ray

from examples.applications.asynchronous_sgd import training
from examples.applications.ray_hosts import connect, here
from examples.applications.running import arguments, say


@ray.remote(num_cpus=0, resources={"place": 1}, max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self, part, parts):
        self.learner, self.part, self.parts = training.Learner(), part, parts

    def gradient(self, weights):
        out = np.zeros(weights.shape, np.float32)
        return self.learner.gradient(weights, self.part, self.parts, out)


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, weights):
        self.weights, self.record = weights, training.Record()

    def apply(self, *gradients):
        self.weights = training.stepped(self.weights, gradients)
        self.record.note(self.weights)
        return self.weights

    def accuracies(self):
        return self.record.accuracies()


def train(given):
    weights = ray.put(training.first_weights(training.size_of(given.megabytes)))
    server = Server.options(**here()).remote(weights)
    workers = [Worker.remote(part, given.hosts) for part in range(given.hosts)]
    half = len(workers) // 2
    running = {worker.gradient.remote(weights): worker for worker in workers}
    ray.wait(list(running), num_returns=len(workers))  # wait until all processes have started
    say("begun")
    steps, end = [], time.monotonic() + given.seconds
    while not steps or steps[-1] < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        weights = server.apply.remote(*ready)
        for gradient in ready:
            worker = running.pop(gradient)
            running[worker.gradient.remote(weights)] = worker
        steps.append(time.monotonic())
    ray.wait([weights])
    say("ended")
    return {"steps": steps, "accuracy": ray.get(server.accuracies.remote()), "taken": half}


if __name__ == "__main__":
    given = arguments(megabytes=5, seconds=5)
    connect(given)
    say("result", **train(given))
