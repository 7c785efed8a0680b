"""How do I train synchronously, and continue when a member dies?

All peers call `allreduce`. When a peer is killed, the call completes among the survivors with the
same bits on all of them; `contributors` names the ranks in the result. docs/rejoining.md shows how
a dead member rejoins.
"""

import os
import signal

import numpy as np

import hoplite_mp

MEMBERS, STEPS, FEATURES = 4, 300, 20
VICTIM, LAST_STEP = 2, 100


def train(rank, size):
    g = hoplite_mp.current().group("training", size, rank)
    rng = np.random.default_rng(rank)
    truth = np.arange(FEATURES, dtype=float)
    weights = np.zeros(FEATURES)
    history = []
    for step in range(STEPS):
        if rank == VICTIM and step == LAST_STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        x = rng.normal(size=(64, FEATURES))
        gradient = x.T @ (x @ (weights - truth)) / 64
        weights -= 0.1 * g.allreduce(gradient, op="mean")
        history.append(g.contributors)
    return weights, history


def main():
    with hoplite_mp.Cluster(workers=0) as c:
        members = c.options(retries=0).spmd(train, MEMBERS, MEMBERS)
        c.wait(members)
        assert isinstance(members[VICTIM].exception(), hoplite_mp.WorkerLostError)
        print(f"member {VICTIM}: {members[VICTIM].exception()}")
        alive = [members[rank].result() for rank in range(MEMBERS) if rank != VICTIM]
    weights, history = alive[0]
    for other, its_history in alive[1:]:
        assert np.array_equal(other, weights), "survivors have the same bits"
        assert its_history == history
    print(f"contributors at the first and the last step: {history[0]}, {history[-1]}")
    error = float(np.abs(weights - np.arange(FEATURES)).max())
    print(f"largest error of a weight: {error:.2e}")
    assert error < 1e-3


if __name__ == "__main__":
    main()
