"""What all these programs train: a small network on Fashion-MNIST, its weights one flat array.

Only the first WEIGHTS numbers of that array belong to the network. The rest is padding: it travels
as weights do, and costs no computing, so that large models can be moved on a small machine.
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
    """How many numbers are in an array of so many MB; at least those of the network (5 MB)."""
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
    """Computes gradients from a part of the data, which it has as a whole."""

    def __init__(self):
        pixels, labels = load("train")
        self.pixels, self.labels = pixels, labels.astype(np.int64)
        self.model, self.random = network(), np.random.default_rng()

    def gradient(self, weights, part, parts, out):
        """Of the loss on some images of that part, chosen at random, into `out`."""
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
    """New weights; the gradients are added up here."""
    new = gradients[0].copy()
    for gradient in gradients[1:]:
        new += gradient
    new *= -RATE / len(gradients)
    new += weights
    return new


class Record:
    """Keeps the network's weights now and then; how good they were is found out at the end, so
    that it disturbs nobody."""

    def __init__(self):
        self.kept = []

    def note(self, weights):
        now = time.monotonic()
        if not self.kept or now > self.kept[-1][0] + NOTE_EVERY_S:
            self.kept.append((now, weights[:WEIGHTS].copy()))

    def accuracies(self):
        """Pairs of a time and the share of test images that were recognized then."""
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
    """One for this process, where tasks have no object of their own to keep it in."""
    return Learner()


@functools.cache
def record():
    """One for this process."""
    return Record()
