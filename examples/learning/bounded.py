"""How do I keep one slow rank from delaying every step?

Four ranks fit a line. One of them is often late: the others go on without its gradient, which
`Feedback` adds to a later one.
"""

import time

import numpy as np

import hoplite_mp
from hoplite_mp import ml

SIZE, STEPS, RATE, LATE_S = 4, 60, 0.3, 0.05


def train(rank):
    """The weights, and how often each rank was left out."""
    rng = np.random.default_rng(rank)
    x = rng.normal(size=(200, 2)).astype(np.float32)
    y = x @ np.array([2.0, -1.0], np.float32)
    weights, left_out = np.zeros(2, np.float32), np.zeros(SIZE, int)
    with hoplite_mp.current().group("train", SIZE, rank) as group:
        feedback = ml.Feedback(group, ml.Float16())
        for step in range(STEPS):
            if rank == SIZE - 1 and step % 10 == 9:
                time.sleep(LATE_S)
            grad = x.T @ (x @ weights - y) / len(x)
            weights -= RATE * feedback.allreduce("w", grad, deadline=0.01, num=SIZE - 1)
            left_out += [one not in feedback.contributors for one in range(SIZE)]
    return weights, left_out


def main():
    with hoplite_mp.Cluster(workers=2) as c:
        found = [rank.result() for rank in c.spmd(train, SIZE)]
    assert len({weights.tobytes() for weights, _ in found}) == 1
    print("the weights of all ranks:", found[0][0].round(3))
    print("steps without each rank:", found[0][1])


if __name__ == "__main__":
    main()
