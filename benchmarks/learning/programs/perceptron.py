"""A perceptron for Fashion-MNIST in numpy: one flat array of parameters, and one of gradients."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from examples.applications.fashion_mnist import CLASSES, PIXELS, load

__all__ = ["Perceptron", "Shard", "accuracy"]

Array = np.ndarray[Any, np.dtype[Any]]
LAYERS = (PIXELS, 1000, 450, CLASSES)  # 1 239 960 parameters, 5 MB


class Perceptron:
    """784-1000-450-10 with ReLU, a softmax and cross entropy."""

    def __init__(self, seed: int = 0) -> None:
        shapes = [one for a, b in itertools.pairwise(LAYERS) for one in ((a, b), (b,))]
        sizes = [int(np.prod(shape)) for shape in shapes]
        self.flat = np.zeros(sum(sizes), np.float32)
        self.grad = np.zeros_like(self.flat)
        ends = np.cumsum(sizes)[:-1]
        views = zip(np.split(self.flat, ends), np.split(self.grad, ends), shapes, strict=True)
        self.pairs = [(p.reshape(shape), g.reshape(shape)) for p, g, shape in views]
        rng = np.random.default_rng(seed)
        for weights, _ in self.pairs[::2]:
            weights[...] = rng.normal(size=weights.shape) * np.sqrt(2 / len(weights))
        self.compute_s = 0.0  # CPU seconds in `gradient`

    def _layers(self, x: Array) -> list[Array]:
        layers = [x]
        for at in range(0, len(self.pairs), 2):
            x = layers[-1] @ self.pairs[at][0] + self.pairs[at + 1][0]
            layers.append(np.maximum(x, 0) if at + 2 < len(self.pairs) else x)
        return layers

    def gradient(self, x: Array, labels: Array) -> Array:
        """The mean gradient over a batch, in `self.grad`."""
        begun = time.thread_time()
        layers = self._layers(x)
        p = np.exp(layers[-1] - layers[-1].max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        back = p / np.float32(len(labels))
        for at in range(len(self.pairs) - 2, -1, -2):
            before = layers[at // 2]
            np.matmul(before.T, back, out=self.pairs[at][1])
            self.pairs[at + 1][1][...] = back.sum(axis=0)
            if at:
                back = (back @ self.pairs[at][0].T) * (before > 0)
        self.compute_s += time.thread_time() - begun
        return self.grad

    def classes(self, x: Array) -> Array:
        found: Array = self._layers(x)[-1].argmax(axis=1)
        return found


class Shard:
    """A rank's part of the training data: every `ranks`-th image, or by label."""

    def __init__(self, rank: int, ranks: int, batch: int, by_label: bool = False) -> None:
        images, labels = load("train")
        order = np.argsort(labels, kind="stable") if by_label else np.arange(len(labels))
        mine = np.array_split(order, ranks)[rank] if by_label else order[rank::ranks]
        self.images, self.labels, self.batch = images[mine], labels[mine], batch
        self.rng = np.random.default_rng(rank)

    def next(self) -> tuple[Array, Array]:
        at = self.rng.integers(0, len(self.labels), self.batch)
        return self.images[at].astype(np.float32) / 255 - np.float32(0.2860), self.labels[at]


def accuracy(model: Perceptron, parameters: list[Array], images: int) -> list[float]:
    """On the first test images, for each of these parameters."""
    x, labels = (one[:images] for one in load("t10k"))
    x = x.astype(np.float32) / 255 - np.float32(0.2860)
    found = []
    for flat in parameters:
        model.flat[...] = flat
        found.append(float((model.classes(x) == labels).mean()))
    return found
