"""The same on Dask alone: tasks play, and `as_completed` yields the first ones that are ready.

The policy is scattered to the worker of the learner's host; the other workers fetch it from there,
or from each other. A sampler's environments stay in its worker's process.

Needs: distributed, gymnasium, torch
"""

import time

from distributed import as_completed, wait

from examples.applications.dask_hosts import connect
from examples.applications.policies import Learner, Record, sampler
from examples.applications.running import arguments, say


def play(policy, environment, seed):
    return sampler(environment, seed).play(policy)


def train(client, workers, given):
    server, places = workers[0], workers[1:]  # the learner's host, and the other hosts

    def scattered():
        return client.scatter(learner.policy, workers=[server], direct=True, hash=False)

    def begin(seed):
        future = client.submit(
            play, policy, given.environment, seed, workers=places[seed], pure=False
        )
        seed_of[future] = seed
        return future

    learner, record = Learner(given.environment, given.megabytes), Record()
    half, seed_of = (len(places) + 1) // 2, {}
    policy = scattered()
    begun = [begin(seed) for seed in range(len(places))]
    wait(begun)  # wait for all workers
    ready = as_completed(begun)
    del begun
    say("begun")
    end = time.monotonic() + given.seconds
    while time.monotonic() < end:
        done = [next(ready) for _ in range(half)]
        rollouts, seen = zip(*client.gather(done, direct=True), strict=True)
        learner.learn(rollouts)
        policy = scattered()
        for seed in [seed_of.pop(future) for future in done]:
            ready.add(begin(seed))
        record.note(seen)
    say("ended")
    return record.found()


if __name__ == "__main__":
    given = arguments(environment="CartPole-v1", megabytes=0, seconds=10)
    client, workers = connect(given)
    say("result", **train(client, workers, given))
    client.shutdown()
