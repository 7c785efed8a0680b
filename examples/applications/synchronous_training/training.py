"""The model of both programs: a small network on Fashion-MNIST, trained synchronously.

The model has additional parameters, all zero. Their gradients are zeros that are sent but not
computed, so that a small machine can imitate large models.
"""

import time

import numpy as np
import torch

from examples.applications.fashion_mnist import CLASSES, PIXELS, load

BATCH, RATE, WARM_UP = 32, 0.1, 3
PART = 5_000_000  # bytes of one parameter of zeros: many small parameters, as in real models


class Model(torch.nn.Module):
    """The network, and parameters of zeros, of `megabytes` in total."""

    def __init__(self, megabytes):
        super().__init__()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(
            torch.nn.Linear(PIXELS, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
        )
        left = megabytes * 1e6 - sum(4 * one.numel() for one in self.network.parameters())
        sizes = [min(PART, left - at) for at in range(0, max(0, int(left)), PART)]
        self.padding = torch.nn.ParameterList(
            torch.zeros(int(size) // 4) for size in sizes if size >= 4
        )

    def forward(self, images):
        return self.network(images) + sum(0 * one[0] for one in self.padding)

    def optimizer(self):
        """An optimizer for the network only, without the padding."""
        return torch.optim.SGD(self.network.parameters(), lr=RATE, momentum=0.9)


class Data:
    """A rank's data for each step; the same after a restart."""

    def __init__(self, rank, size):
        self.pixels, self.labels = load("train")
        self.rank, self.size = rank, size

    def batch(self, step):
        order = torch.Generator().manual_seed(step * self.size + self.rank)
        chosen = torch.randint(len(self.labels), (BATCH,), generator=order).numpy()
        images = self.pixels[chosen].astype(np.float32) / 255
        return torch.from_numpy(images), torch.from_numpy(self.labels[chosen].astype(np.int64))


class Record:
    """The time of each step, the rank's loss, and the number of ranks that took part."""

    def __init__(self):
        self.steps, self.losses, self.ranks = [], [], []

    def note(self, loss, ranks):
        self.steps.append(time.monotonic())
        self.losses.append(loss.item())
        self.ranks.append(ranks)
