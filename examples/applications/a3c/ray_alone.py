"""The same on Ray alone: the learner fetches the gradients from `ray.wait`, and adds them up.

Needs: gymnasium, ray, torch
"""

import time

import numpy as np
import ray

from examples.applications import policies
from examples.applications.policies import Learner, Record
from examples.applications.ray_hosts import connect
from examples.applications.running import arguments, say


@ray.remote(num_cpus=0, resources={"away": 1})  # not on the learner's host
class Sampler(policies.Sampler):
    def gradient(self, policy):
        return super().gradient(policy, np.empty_like(policy))


def train(given):
    samplers = [Sampler.remote(given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = ray.put(learner.policy)
    running = {sampler.gradient.remote(policy): sampler for sampler in samplers}
    ray.wait(list(running), num_returns=len(running))  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        gradients, seen = zip(*ray.get(ready), strict=True)
        learner.apply(policies.mean(gradients))
        policy = ray.put(learner.policy)
        for one in ready:
            sampler = running.pop(one)
            running[sampler.gradient.remote(policy)] = sampler
        record.note(seen)
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(environment="CartPole-v1", megabytes=0, seconds=10)
    connect(given)
    say("result", **train(given))
