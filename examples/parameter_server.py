"""How do I write a parameter server that loses no update when its process is killed?

An actor is an object in a process of its own, whose calls run one after another. With
`checkpoint=1` its state is saved after every call, together with results that callers may not have
received, so a call that is retried after a death is applied only once.
"""

import os
import signal

import numpy as np

import hoplite_mp

FEATURES, WORKERS, PUSHES = 30, 3, 60
RATE = 0.1


class Server:
    def __init__(self, size):
        self.weights = np.zeros(size)
        self.version = 0

    def pull(self):
        return self.version, self.weights

    def push(self, gradient, version):
        staleness = self.version - version
        self.weights = self.weights - RATE / (1 + staleness) * gradient
        self.version += 1
        return staleness

    def pid(self):
        return os.getpid()


def work(server, seed):
    rng = np.random.default_rng(seed)
    truth = np.ones(FEATURES)
    stale = 0
    for _ in range(PUSHES):
        version, weights = server.pull().result()
        x = rng.normal(size=(64, FEATURES))
        gradient = x.T @ (x @ (weights - truth)) / 64
        stale = max(stale, server.push(gradient, version).result())
    return stale


def main():
    with hoplite_mp.Cluster(workers=WORKERS) as c:
        options = c.options(name="server", restarts=3, checkpoint=1, retries=3)
        server = options.actor(Server, FEATURES)
        working = [c.submit(work, server, seed) for seed in range(WORKERS)]
        while server.pull().result()[0] < PUSHES:
            pass  # until a third of the updates are done
        os.kill(server.pid().result(), signal.SIGKILL)
        stalest = max(one.result() for one in working)
        version, weights = c.get_actor("server").pull().result()
        print(f"the server was started again {hoplite_mp.Actor.restarts(server)} time(s)")
    error = float(np.abs(weights - 1).max())
    print(f"{version} gradients, at most {stalest} versions old; largest error {error:.3f}")
    assert version == WORKERS * PUSHES, "none was lost, and none applied twice"
    assert error < 0.1


if __name__ == "__main__":
    main()
