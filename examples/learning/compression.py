"""How do I send fewer bytes of gradients, and lose no accuracy?

Four ranks train a perceptron on scikit-learn's digits. A rank sends 1 % of the entries of its
gradient, and keeps the rest for later steps; beside it the same training with all entries.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

RANKS, STEPS, TEST = 4, 300, 360
HIDDEN, RATE, BATCH = 100, 0.2, 32


def gradient(w1, w2, x, y):
    """The mean gradient of softmax regression with one hidden layer."""
    hidden = np.maximum(x @ w1, 0)
    p = np.exp(hidden @ w2)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    return x.T @ ((p @ w2.T) * (hidden > 0)), hidden.T @ p


def train(rank, compressor, digits):
    x, y = digits
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].astype(np.float32) / 16, y[order]
    mine = np.arange(TEST, len(y))[rank::RANKS]
    start, batches = np.random.default_rng(1), np.random.default_rng(rank)
    w1 = (start.normal(size=(64, HIDDEN)) * 0.1).astype(np.float32)
    w2 = (start.normal(size=(HIDDEN, 10)) * 0.1).astype(np.float32)
    group = hoplite_mp.current().group(f"training with {compressor}", RANKS, rank)
    feedback = ml.Feedback(group, compressor)
    for _ in range(STEPS):
        at = batches.choice(mine, BATCH)
        g1, g2 = gradient(w1, w2, x[at], y[at])
        total = feedback.allreduce("weights", np.concatenate([g1.ravel(), g2.ravel()]))
        w1 -= RATE * total[: w1.size].reshape(w1.shape)
        w2 -= RATE * total[w1.size :].reshape(w2.shape)
    found = (np.maximum(x[:TEST] @ w1, 0) @ w2).argmax(axis=1)
    return (found == y[:TEST]).mean(), feedback.sent


with hoplite_mp.Cluster(workers=RANKS) as c:
    digits = c.put(load_digits(return_X_y=True))
    for compressor in (ml.TopK(1), ml.Quantise(8), ml.TopK(0.01)):
        accuracy, sent = c.spmd(train, RANKS, compressor, digits)[0].result()
        print(f"{compressor}: accuracy {accuracy:.3f}, sent by a rank {sent / 1e6:.2f} MB")
