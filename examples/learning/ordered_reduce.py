"""How do I leave out gradients that are too small to matter?

The shards of eight tasks have sizes in proportion to 1/rank². Gradients are sent in falling order
of norm, until the sum of the norms not sent is at most a quarter of the norm of the sum.

Needs: sklearn
(`pip install 'hoplite-mp[ml]'`)
"""

import numpy as np
from sklearn.datasets import load_digits

import hoplite_mp
from hoplite_mp import ml

TASKS, STEPS, TEST = 8, 40, 360


def gradient(weights, shard):
    """The sum of the gradients of softmax regression over a shard."""
    x, y = shard
    p = np.exp(x @ weights)
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p


with hoplite_mp.Cluster(workers=2) as c:
    x, y = load_digits(return_X_y=True)
    x /= 16
    order = np.random.default_rng(0).permutation(len(y))
    test, rest = order[:TEST], order[TEST:]
    shares = 1 / np.arange(1, TASKS + 1) ** 2
    ends = (np.cumsum(shares / shares.sum()) * len(rest)).astype(int)
    shards = [c.put((x[one], y[one])) for one in np.split(rest, ends[:-1])]
    weights, sent, nbytes = np.zeros((64, 10)), 0, 0
    for _ in range(STEPS):
        grads = [c.submit(gradient, weights, shard) for shard in shards]
        norms = [c.submit(np.linalg.norm, grad) for grad in grads]
        total = ml.ordered_reduce(grads, norms, xi=0.25)
        weights = weights - 0.5 * c.get(total) / len(rest)
        sent += len(total.contributors)
        nbytes += len(total.contributors) * weights.nbytes
    found = (x[test] @ weights).argmax(axis=1)
    accuracy = (found == y[test]).mean()
    share = sent / STEPS / TASKS
    print(f"accuracy {accuracy:.3f}; sent {share:.0%} of the gradients, {nbytes / 1e3:.0f} kB")
