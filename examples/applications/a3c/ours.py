"""How do I learn from gradients that samplers compute, on several hosts?

A3C: `reduce(..., num=)` returns the mean of the first half of the gradients, added up in transit to
the learner, which is this process. The samplers of these gradients start again with the new policy;
the other samplers keep running, and count in a later step.

Needs: gymnasium, torch
"""

import time

import hoplite_mp
from examples.applications import policies
from examples.applications.our_hosts import connect
from examples.applications.policies import Learner, Record
from examples.applications.running import arguments, say


class Sampler(policies.Sampler):
    def gradient(self, policy):
        out = hoplite_mp.current().empty(policy.shape, policy.dtype)
        gradient, self.latest = super().gradient(policy, out)
        return gradient

    def seen(self):
        return self.latest


def train(c, given):
    away = c.options(resources={"away": 1})  # not on the learner's host
    samplers = [away.actor(Sampler, given.environment, seed) for seed in range(given.hosts - 1)]
    learner, record = Learner(given.environment, given.megabytes), Record()
    half = (len(samplers) + 1) // 2
    policy = c.put(learner.policy)
    running = [sampler.gradient(policy) for sampler in samplers]
    seen = [sampler.seen() for sampler in samplers]
    c.wait(running)  # wait until all processes have started
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        mean = c.reduce(running, op="mean", num=half)
        learner.apply(c.get(mean))
        policy = c.put(learner.policy)
        record.note([seen[one].result() for one in mean.contributors])
        for one in mean.contributors:
            running[one] = samplers[one].gradient(policy)
            seen[one] = samplers[one].seen()
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(environment="CartPole-v1", megabytes=0, seconds=10, tls=False)
    with connect(given) as c:
        say("result", **train(c, given))
