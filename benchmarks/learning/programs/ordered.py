"""Gradients of digits, reduced in falling order of norm: which share is sent, and how well it
trains.

`python -m benchmarks.learning.programs.ordered '{"hosts": 2, "shards": "skewed"}'`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from hoplite_mp import ml

WARM_UP = 3
HIDDEN, CLASSES, TEST = 64, 10, 360
Array = np.ndarray[Any, np.dtype[Any]]


def shards_of(kind: str, ranks: int) -> list[Array]:
    """Indices of the training images of each rank."""
    order = np.random.default_rng(0).permutation(len(load_digits().target))[TEST:]
    if kind == "sorted":
        order = order[np.argsort(load_digits().target[order], kind="stable")]
    shares = np.array([1 / (at + 1) ** 2 if kind == "skewed" else 1.0 for at in range(ranks)])
    ends = np.cumsum(shares / shares.sum() * len(order)).astype(int)[:-1]
    return np.split(order, ends)


def loss_gradient(flat: Array, x: Array, labels: Array) -> Array:
    """The sum of the gradients of softmax regression with one hidden layer of ReLU."""
    w1, w2 = np.split(flat, [x.shape[1] * HIDDEN])
    w1, w2 = w1.reshape(-1, HIDDEN), w2.reshape(HIDDEN, CLASSES)
    hidden = np.maximum(x @ w1, 0)
    p = np.exp(hidden @ w2 - (hidden @ w2).max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(labels)), labels] -= 1
    back = (p @ w2.T) * (hidden > 0)
    return np.concatenate([(x.T @ back).ravel(), (hidden.T @ p).ravel()])


def gradient(flat: Array, mine: Array, step: int) -> Array:
    """Of a quarter of the shard."""
    digits = load_digits()
    rng = np.random.default_rng([step, int(mine[0])])
    chosen = rng.choice(mine, max(1, len(mine) // 4), replace=False)
    return loss_gradient(flat, digits.data[chosen] / 16, digits.target[chosen])


def accuracy(flat: Array) -> float:
    digits = load_digits()
    test = np.random.default_rng(0).permutation(len(digits.target))[:TEST]
    x, w = digits.data[test] / 16, np.split(flat, [digits.data.shape[1] * HIDDEN])
    scores = np.maximum(x @ w[0].reshape(-1, HIDDEN), 0) @ w[1].reshape(HIDDEN, CLASSES)
    return float((scores.argmax(axis=1) == digits.target[test]).mean())


def train(c: Any, given: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    flat = rng.normal(size=64 * HIDDEN + HIDDEN * CLASSES) * 0.1
    shards, nodes = shards_of(given.shards, given.hosts), c.nodes
    images = sum(map(len, shards)) // 4
    sent = 0
    for step in range(given.steps + WARM_UP):
        if step == WARM_UP:
            sent, begun = 0, time.monotonic()
            say("begun")
        params = c.put(flat)
        at = [c.options(node=node) for node in nodes]
        grads = [
            one.submit(gradient, params, mine, step) for one, mine in zip(at, shards, strict=True)
        ]
        norms = [one.submit(np.linalg.norm, grad) for one, grad in zip(at, grads, strict=True)]
        total = c.reduce(grads) if given.xi < 0 else ml.ordered_reduce(grads, norms, xi=given.xi)
        flat = flat - given.lr * c.get(total) / images  # the value is there: so are its sources
        sent += len(total.contributors)
    say("ended")
    return {
        "share": sent / given.steps / given.hosts,
        "accuracy": accuracy(flat),
        "seconds": time.monotonic() - begun,
    }


if __name__ == "__main__":
    given = arguments(steps=60, shards="equal", xi=0.25, lr=0.5, tls=False)
    with connect(given) as c:
        say("result", **train(c, given))
