"""How do I keep parameters in one process that others update?

An actor is an object in a process of its own; calls on its handle run one after the other. Workers
pull the parameters and push gradients whenever they are ready.
"""

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
        server = c.options(name="server").actor(Server, FEATURES)
        stalest = list(c.map(work, [server] * WORKERS, range(WORKERS)))
        version, weights = c.get_actor("server").pull().result()
    error = float(np.abs(weights - 1).max())
    print(f"{version} gradients, at most {max(stalest)} versions old; largest error {error:.3f}")
    assert version == WORKERS * PUSHES
    assert error < 0.1


if __name__ == "__main__":
    main()
