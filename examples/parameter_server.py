"""How do I keep parameters in one process that others update, and lose none when it is killed?

An actor is an object in a process of its own; calls on its handle run one after the other. With
`checkpoint=1` its state is kept after every call, together with the results that callers may not
have yet, so a call that is tried again after a death is applied once.
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
            pass  # until a third of all is done
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
