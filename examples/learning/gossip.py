"""How do I average models with a few partners, and not with all ranks?

Four ranks train a classifier, each on its own part of the handwritten digits of scikit-learn, and
mix their models by gossip. The mean of the models is what allreduce would give them.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

SIZE, ROUNDS, RATE = 4, 40, 0.5


def gradient(weights, x, labels):
    scores = np.exp(x @ weights - (x @ weights).max(axis=1, keepdims=True))
    error = scores / scores.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    return x.T @ error / len(labels)


def train(rank, topology, x, labels, test):
    """Accuracy on the test digits, and the bytes sent."""
    own = slice(rank, None, SIZE)
    with hoplite_mp.current().group(f"train-{topology}", SIZE, rank) as group:
        gossip = ml.Gossip(group, deadline=1.0, topology=topology)
        weights = np.zeros((x.shape[1], 10))
        for _ in range(ROUNDS):
            weights = gossip.mix(weights - RATE * gradient(weights, x[own], labels[own]))
        spread = np.ptp(np.stack(group.allgather(weights)), axis=0).max()
    return ((test[0] @ weights).argmax(axis=1) == test[1]).mean(), spread, gossip.sent


def main():
    digits, labels = load_digits(return_X_y=True)
    digits = digits / 16
    test = digits[1400:], labels[1400:]
    with hoplite_mp.Cluster(workers=2) as c:
        for topology in ("reliable", "ring", "random"):
            ranks = c.spmd(train, SIZE, topology, digits[:1400], labels[:1400], test)
            for rank, one in enumerate(ranks):
                accuracy, spread, sent = one.result()
                if rank == 0:
                    print(f"{topology}: accuracy {accuracy:.3f}, {sent} bytes sent by rank 0,")
                    print(f"    and the models differ by at most {spread:.3f}")


if __name__ == "__main__":
    main()
