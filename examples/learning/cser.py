"""How do I train with few bytes if the ranks may keep models of their own for a while?

Four ranks train softmax regression on scikit-learn's digits by CSER: a step sends one block of the
update in eight, and every fourth step resets a quarter of the errors that the ranks have kept.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

RANKS, STEPS, BATCH, TEST = 4, 300, 32, 360


def train(rank, digits):
    x, y = digits
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].astype(np.float32) / 16, y[order]
    mine, batches = np.arange(TEST, len(y))[rank::RANKS], np.random.default_rng(rank)
    weights = np.zeros((64, 10), np.float32)
    group = hoplite_mp.current().group("cser", RANKS, rank)
    sgd = ml.CSER([weights], group, lr=0.1, update_ratio=8, reset_ratio=4, reset_every=4, block=10)
    for _ in range(STEPS):
        at = batches.choice(mine, BATCH)
        p = np.exp(x[at] @ weights)
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(BATCH), y[at]] -= 1
        sgd.step([x[at].T @ p / BATCH])
    sent = sgd.sent
    sgd.synchronize()  # from here on the weights are the same on all ranks
    accuracy = ((x[:TEST] @ weights).argmax(axis=1) == y[:TEST]).mean()
    return accuracy, sent, STEPS * 2 * weights.nbytes * (RANKS - 1) // RANKS


with hoplite_mp.Cluster(workers=RANKS) as c:
    accuracy, sent, dense = c.spmd(train, RANKS, load_digits(return_X_y=True))[0].result()
    print(f"accuracy {accuracy:.3f}, sent by a rank {sent / 1e3:.0f} kB of {dense / 1e3:.0f} kB")
