"""The same on Ray, with this library inside: Ray's actors play, the policy is our object.

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
    def play(self, policy):
        return super().play(hoplite_mp.current().get(policy))


def train(c, given):
    samplers = [Sampler.remote(given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = c.put(learner.policy)
    running = {sampler.play.remote(policy): sampler for sampler in samplers}
    ray.wait(list(running), num_returns=len(running))  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        ready, _ = ray.wait(list(running), num_returns=half)
        rollouts, seen = zip(*ray.get(ready), strict=True)
        learner.learn(rollouts)
        policy = c.put(learner.policy)
        for one in ready:
            sampler = running.pop(one)
            running[sampler.play.remote(policy)] = sampler
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
