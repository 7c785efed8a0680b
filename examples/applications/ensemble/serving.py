"""The models of all these programs: eight classifiers of Fashion-MNIST that vote.

A request is a batch of images, an array of numbers from 0 to 1; every model gets the full batch.
"""

import functools
import math
import signal
import time
from os import getpid, kill

import numpy as np

from examples.applications.fashion_mnist import CLASSES, PIXELS, load
from examples.applications.running import say

LEARNED, STEPS, RATE = 6000, 150, 0.02


def share(given):
    """The share of a host for each model, so that hosts have equal numbers of models."""
    return math.floor(1e4 / math.ceil(given.models / (given.hosts - 1))) / 1e4


class Classifier:
    """Softmax regression, trained on a part of the data that depends on the seed."""

    def __init__(self, seed):
        pixels, labels = load("train")
        chosen = np.random.default_rng(seed).integers(len(labels), size=LEARNED)
        images = (pixels[chosen] / 255).astype(np.float32)
        wanted = np.eye(CLASSES, dtype=np.float32)[labels[chosen]]
        self.weights = np.zeros((PIXELS, CLASSES), np.float32)
        for _ in range(STEPS):
            scores = np.exp(images @ self.weights)
            error = scores / scores.sum(axis=1, keepdims=True) - wanted
            self.weights -= RATE / LEARNED * 50 * (images.T @ error)

    def predict(self, batch):
        return (batch @ self.weights).argmax(axis=1).astype(np.uint8)

    def ready(self):
        return True

    def die(self):
        kill(getpid(), signal.SIGKILL)


@functools.cache
def classifier(seed):
    """A single instance for this process, because tasks have no state of their own."""
    return Classifier(seed)


class Requests:
    """Batches of test images of a given size; records the accuracy and time of the answers."""

    def __init__(self, given):
        pixels, labels = load("t10k")
        rows = max(1, round(given.megabytes * 1e6 / 4 / PIXELS))
        self.order = np.resize(np.arange(len(labels)), rows)
        self.batch = (pixels[self.order] / 255).astype(np.float32)
        self.labels, self.right, self.voters = labels[self.order], [], []
        self.begun, self.answered, self.given = [], [], given

    def __iter__(self):
        """One request after another, each after the answer to the previous one."""
        say("begun")
        end, kill_at = self._after(self.given.seconds), self._after(self.given.kill_s)
        while time.monotonic() < end:
            self.killing = time.monotonic() > kill_at  # kill a replica now
            kill_at = end if self.killing else kill_at
            self.begun.append(time.monotonic())
            yield self.batch
        say("ended")

    @staticmethod
    def _after(seconds):
        return time.monotonic() + (1e9 if seconds is None else seconds)

    def answer(self, answers):
        """Takes the vote of the models that have answered."""
        votes = np.zeros((len(self.labels), CLASSES), np.uint8)
        for one in answers:
            votes[np.arange(len(one)), one] += 1
        self.answered.append(time.monotonic())
        self.right.append(float((votes.argmax(axis=1) == self.labels).mean()))
        self.voters.append(len(answers))

    def found(self):
        return {"begun": self.begun, "steps": self.answered, "right": float(np.mean(self.right)),
                "voters": self.voters}  # fmt: skip
