"""The model of these programs: a small network on Fashion-MNIST, whose weights are one flat array.

Only the first WEIGHTS numbers of the array belong to the network. The rest is padding: it is sent
like weights but not computed, so that a small machine can imitate large models.
"""

import functools
import itertools
import time

import numpy as np
import torch

from examples.applications.fashion_mnist import PIXELS, load

LAYERS = (PIXELS, 1000, 450, 10)
WEIGHTS = sum(before * after + after for before, after in itertools.pairwise(LAYERS))
RATE, BATCH, TESTED, NOTE_EVERY_S = 0.1, 32, 2000, 0.5


def size_of(megabytes):
    """The size of an array of `megabytes`, at least that of the network (5 MB)."""
    return max(WEIGHTS, round(megabytes * 1e6 / 4))


def floats(pixels):
    return torch.from_numpy(pixels.astype(np.float32) / 255)


def network():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    linear = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(LAYERS)]
    between = [torch.nn.ReLU() for _ in linear]
    return torch.nn.Sequential(
        *[x for pair in zip(linear, between, strict=True) for x in pair][:-1]
    )


def first_weights(size):
    weights = np.zeros(size, np.float32)
    parameters = torch.nn.utils.parameters_to_vector(network().parameters())
    weights[:WEIGHTS] = parameters.detach().numpy()
    return weights


def put_into(model, weights):
    vector = torch.tensor(weights[:WEIGHTS])
    torch.nn.utils.vector_to_parameters(vector, model.parameters())


class Learner:
    """Computes gradients from parts of the data, all of which it has loaded."""

    def __init__(self):
        pixels, labels = load("train")
        self.pixels, self.labels = pixels, labels.astype(np.int64)
        self.model, self.random = network(), np.random.default_rng()

    def gradient(self, weights, part, parts, out):
        """Writes the gradient of the loss on random images of a part to `out`."""
        chosen = self.random.integers(len(self.labels) // parts, size=BATCH) * parts + part
        put_into(self.model, weights)
        self.model.zero_grad()
        guess = self.model(floats(self.pixels[chosen]))
        torch.nn.functional.cross_entropy(guess, torch.from_numpy(self.labels[chosen])).backward()
        gradients = torch.cat([p.grad.view(-1) for p in self.model.parameters()])
        out[:WEIGHTS] = gradients.numpy()
        out[WEIGHTS:] = 0
        return out


def stepped(weights, gradients):
    """New weights, from the mean of the gradients."""
    new = gradients[0].copy()
    for gradient in gradients[1:]:
        new += gradient
    new *= -RATE / len(gradients)
    new += weights
    return new


class Record:
    """Keeps a copy of the weights from time to time. Accuracies are computed only at the end, so
    that the training is not disturbed."""

    def __init__(self):
        self.kept = []

    def note(self, weights):
        now = time.monotonic()
        if not self.kept or now > self.kept[-1][0] + NOTE_EVERY_S:
            self.kept.append((now, weights[:WEIGHTS].copy()))

    def accuracies(self):
        """Pairs of a time and the accuracy on test images at that time."""
        pixels, labels = load("t10k")
        images, model = floats(pixels[:TESTED]), network()
        right = torch.from_numpy(labels[:TESTED].astype(np.int64))
        found = []
        for at, weights in self.kept:
            put_into(model, weights)
            with torch.no_grad():
                found.append((at, float((model(images).argmax(1) == right).float().mean())))
        return found


@functools.cache
def learner():
    """A single instance for this process, because tasks have no state of their own."""
    return Learner()


@functools.cache
def record():
    """A single instance for this process."""
    return Record()
