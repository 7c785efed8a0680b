"""How do I serve an ensemble of models that survives the death of a process?

Each model is an actor with `restarts`: when its process dies, the constructor runs again, queued
calls continue, and the running call fails with an ActorLostError. A vote needs two of three
answers, so clients do not notice the death.
"""

import os
import signal

import numpy as np

import hoplite_mp

REPLICAS, REQUESTS, NEEDED = 3, 60, 2


class Model:
    def __init__(self, seed):
        self.weights = np.random.default_rng(seed).normal(1.0, 0.1, size=16)

    def predict(self, batch):
        return np.sign(batch @ self.weights)

    def pid(self):
        return os.getpid()


def vote(c, models, batch):
    """The majority of the first answers."""
    asked = [model.predict(batch) for model in models]
    while True:
        done, waiting = c.wait(asked, num=min(NEEDED, len(asked)))
        answers = [c.get(one) for one in done if one.exception() is None]
        if len(answers) >= NEEDED or not waiting:
            return np.sign(np.sum(answers, axis=0)), len(answers)
        asked = waiting + [one for one in done if one.exception() is None]


def main():
    rng = np.random.default_rng(0)
    right = []
    with hoplite_mp.Cluster(workers=0) as c:
        models = [c.options(restarts=3).actor(Model, seed) for seed in range(REPLICAS)]
        for number in range(REQUESTS):
            if number == REQUESTS // 2:
                os.kill(models[1].pid().result(), signal.SIGKILL)
            batch = rng.normal(size=(100, 16))
            answer, answers = vote(c, models, c.put(batch))
            assert answers >= 1
            right.append(float((answer == np.sign(batch.sum(axis=1))).mean()))
        models[1].predict(np.zeros((1, 16))).result()  # wait for the restart
        print(f"model 1 was started again {hoplite_mp.Actor.restarts(models[1])} time(s)")
        assert hoplite_mp.Actor.restarts(models[1]) == 1
    print(f"{REQUESTS} requests answered, {np.mean(right):.1%} of the predictions right")
    assert np.mean(right) > 0.9


if __name__ == "__main__":
    main()
