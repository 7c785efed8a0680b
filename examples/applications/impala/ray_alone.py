"""The same on Ray alone: actors play, and `ray.wait` returns the first results.

Needs: gymnasium, ray, torch
"""

import time

import ray

from examples.applications.policies import Learner, Record, Sampler
from examples.applications.ray_hosts import connect
from examples.applications.running import arguments, say


def train(given):
    made = ray.remote(num_cpus=0, resources={"away": 1})(Sampler)  # not on the learner's host
    samplers = [made.remote(given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = ray.put(learner.policy)
    running = {sampler.play.remote(policy): sampler for sampler in samplers}
    ray.wait(list(running), num_returns=len(running))  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        rollouts, seen = zip(*ray.get(ready), strict=True)
        learner.learn(rollouts)
        policy = ray.put(learner.policy)
        for one in ready:
            sampler = running.pop(one)
            running[sampler.play.remote(policy)] = sampler
        record.note(seen)
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(environment="CartPole-v1", megabytes=0, seconds=10)
    connect(given)
    say("result", **train(given))
