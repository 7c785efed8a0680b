"""How do I learn from the samplers that are ready first, on several hosts?

IMPALA: the learner, this process, learns from the rollouts of the half that is ready first, and
puts a new policy. It is given to these alone, as a ref: from its host to theirs it goes once, and
they hand it on while it arrives.

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
    c.wait(list(running))  # all processes have started
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
