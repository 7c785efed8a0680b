"""The same on Ray, with this library inside: Ray's actors return our refs to gradients, which
`reduce` adds up in transit to the learner.

Refs that Ray carries are held for `ref_hold_s`, short here, because each step has a new policy.

Needs: gymnasium, ray, torch
"""

import time

import ray

import hoplite_mp
import hoplite_mp.integrations.ray as hoplite_ray
from examples.applications import policies
from examples.applications.policies import Learner, Record
from examples.applications.ray_hosts import connect
from examples.applications.running import arguments, say


@ray.remote(num_cpus=0, resources={"away": 1})  # not on the learner's host
class Sampler(policies.Sampler):
    def gradient(self, policy):
        c = hoplite_mp.current()
        policy = c.get(policy)
        gradient, seen = super().gradient(policy, c.empty(policy.shape, policy.dtype))
        return c.put(gradient), seen


def train(c, given):
    samplers = [Sampler.remote(given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = c.put(learner.policy)
    running = {sampler.gradient.remote(policy): sampler for sampler in samplers}
    ray.wait(list(running), num_returns=len(running))  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        gradients, seen = zip(*ray.get(ready), strict=True)
        learner.apply(c.get(c.reduce(gradients, op="mean")))
        policy = c.put(learner.policy)
        for one in ready:
            sampler = running.pop(one)
            running[sampler.gradient.remote(policy)] = sampler
        record.note(seen)
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(
        environment="CartPole-v1", megabytes=0, seconds=10, memory="512MiB", tls=False
    )
    connect(given)
    c = hoplite_ray.init(memory=given.memory, tls=given.tls, ref_hold_s=5)
    say("result", **train(c, given))
