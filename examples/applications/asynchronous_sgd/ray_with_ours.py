"""The same on Ray, with this library inside: Ray's actors, our objects.

Actors take and return refs; the arrays are in the store beside each Ray node. The server adds them
up in transit, with `reduce`. Refs that Ray carries are held for `ref_hold_s`, which is short
here, and gradients are deleted after use.

Needs: ray, torch
"""

import time

import numpy as np
import ray
from ray.exceptions import RayError

import hoplite_mp
import hoplite_mp.integrations.ray as hoplite_ray
from examples.applications.asynchronous_sgd import training
from examples.applications.ray_hosts import connect, here
from examples.applications.running import arguments, say
from hoplite_mp.errors import ReduceError


@ray.remote(num_cpus=0, resources={"place": 1}, max_restarts=-1, max_task_retries=-1)
class Worker:
    def __init__(self, part, parts):
        self.learner, self.part, self.parts = training.Learner(), part, parts

    def gradient(self, weights):
        c = hoplite_mp.current()
        weights = c.get(weights)
        out = c.empty(weights.shape, np.float32)
        return c.put(self.learner.gradient(weights, self.part, self.parts, out))


def computed(gradients):
    for gradient in gradients:
        try:
            yield ray.get(gradient)
        except RayError:  # lost with its host, together with its arguments
            continue


@ray.remote(num_cpus=0)
class Server:
    def __init__(self, weights):
        self.c, self.record = hoplite_mp.current(), training.Record()
        self.now = weights

    def apply(self, gradients):
        refs = list(computed(gradients))
        try:
            mean = self.c.get(self.c.reduce(refs, op="mean"))
        except (ReduceError, ValueError):  # some or all gradients are lost with their hosts
            return self.now
        finally:
            self.c.delete(refs)
        new = self.c.empty(mean.shape, np.float32)
        np.multiply(mean, -training.RATE, out=new)
        new += self.c.get(self.now)
        self.record.note(new)
        self.now = self.c.put(new)
        return self.now

    def accuracies(self):
        return self.record.accuracies()


def train(c, given):
    first = c.put(training.first_weights(training.size_of(given.megabytes)))
    server = Server.options(**here()).remote(first)
    workers = [Worker.remote(part, given.hosts) for part in range(given.hosts)]
    half = len(workers) // 2
    running = {worker.gradient.remote(first): worker for worker in workers}
    ray.wait(list(running), num_returns=len(workers))  # wait until all processes have started
    say("begun")
    steps, end = [], time.monotonic() + given.seconds
    while not steps or steps[-1] < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        weights = server.apply.remote(ready)
        for gradient in ready:
            worker = running.pop(gradient)
            running[worker.gradient.remote(weights)] = worker
        steps.append(time.monotonic())
    ray.wait([weights])
    say("ended")
    return {"steps": steps, "accuracy": ray.get(server.accuracies.remote()), "taken": half}


if __name__ == "__main__":
    given = arguments(megabytes=5, seconds=5, memory="512MiB", tls=False)
    connect(given)
    c = hoplite_ray.init(memory=given.memory, tls=given.tls, ref_hold_s=5)
    say("result", **train(c, given))
