"""How do I learn from the first samplers that are ready, on several hosts?

IMPALA: the learner, this process, uses the rollouts of the first half of the samplers to finish,
and puts a new policy. Only these samplers get it, as a ref: the policy leaves the learner's host
once, and the samplers' hosts forward it while it arrives.

Needs: gymnasium, torch
"""

import time

from examples.applications.our_hosts import connect
from examples.applications.policies import Learner, Record, Sampler
from examples.applications.running import arguments, say


def train(c, given):
    away = c.options(resources={"away": 1})  # not on the learner's host
    samplers = [away.actor(Sampler, given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = c.put(learner.policy)
    running = {sampler.play(policy): sampler for sampler in samplers}
    c.wait(list(running))  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        ready, _ = c.wait(list(running), num=half)
        ready = ready[:half]
        rollouts, seen = zip(*[c.get(one) for one in ready], strict=True)
        learner.learn(rollouts)
        policy = c.put(learner.policy)
        for one in ready:
            sampler = running.pop(one)
            running[sampler.play(policy)] = sampler
        record.note(seen)
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(environment="CartPole-v1", megabytes=0, seconds=10, tls=False)
    with connect(given) as c:
        say("result", **train(c, given))
