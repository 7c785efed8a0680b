"""Synchronous training in which gradients are reduced in one of several ways.

`python -m benchmarks.learning.programs.gradients '{"hosts": 2, "method": "threshold"}'`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import hoplite_mp
from benchmarks.learning.programs.perceptron import Perceptron, Shard, accuracy
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from hoplite_mp import ml

WARM_UP = 3
COMPRESSORS: dict[str, Any] = {
    "threshold": ml.Threshold(0.001),
    "topk": ml.TopK(0.001),
    "eight bits": ml.Quantise(8),
    "float16": ml.Float16(),
    "powersgd": ml.PowerSGD(4),
}


class Dense:
    """SGD with the momentum of each rank, on the mean of all ranks, whatever reduces it.

    Momentum comes before compression, because entries of compressed gradients arrive late.
    """

    def __init__(self, model: Perceptron, group: Any, given: Any) -> None:
        self.model, self.group, self.given = model, group, given
        self.velocity = np.zeros_like(model.flat)
        name = given.method.removesuffix(" alone")
        self.feedback = ml.Feedback(group, COMPRESSORS[name]) if name in COMPRESSORS else None
        self.compressor = COMPRESSORS[name] if given.method.endswith(" alone") else None

    def mean(self, grad: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self.compressor is not None:  # without feedback: omitted entries are lost
            sent = self.compressor.decode(self.compressor.encode(grad), grad.size)
            return self.group.allreduce(sent, op="mean")  # type: ignore[no-any-return]
        if self.feedback is None:
            return self.group.allreduce(grad, op="mean")  # type: ignore[no-any-return]
        if not isinstance(self.feedback.compressor, ml.PowerSGD):
            return self.feedback.allreduce("all", grad)
        for at, (_, g) in enumerate(self.model.pairs):
            g[...] = self.feedback.allreduce(str(at), g)
        return grad

    def step(self) -> None:
        self.velocity *= np.float32(self.given.momentum)
        self.velocity += self.model.grad
        self.model.grad[...] = self.velocity
        self.model.flat -= np.float32(self.given.lr) * self.mean(self.model.grad)

    @property
    def common(self) -> np.ndarray[Any, Any]:
        """The parameters that all ranks share, a copy."""
        return self.model.flat.copy()

    @property
    def sent(self) -> int:
        return 0 if self.feedback is None else self.feedback.sent


class Cser:
    """CSER with the momentum of each rank."""

    def __init__(self, model: Perceptron, group: Any, given: Any) -> None:
        self.grad = model.grad
        self.sgd = ml.CSER(
            [model.flat], group, given.lr, given.momentum, given.update_ratio, given.reset_ratio,
            given.reset_every, block=256,
        )  # fmt: skip

    def step(self) -> None:
        self.sgd.step([self.grad])

    @property
    def common(self) -> np.ndarray[Any, Any]:
        """y, without the residuals of the ranks."""
        return self.sgd.y

    @property
    def sent(self) -> int:
        return self.sgd.sent


def train(rank: int, given: Any, warm: Any) -> dict[str, Any]:
    model = Perceptron()
    shard = Shard(rank, given.hosts, given.batch, given.by_label)
    group = hoplite_mp.current().group("training", given.hosts, rank)
    way = (Cser if given.method == "cser" else Dense)(model, group, given)
    kept, times, sent = [], [], 0
    for step in range(given.steps + WARM_UP):
        if step == WARM_UP:
            sent, model.compute_s = way.sent, 0.0
            if rank == 0:
                warm.set()
            times.append(time.monotonic())
        model.gradient(*shard.next())
        way.step()
        if step >= WARM_UP:
            times.append(time.monotonic())
        if rank == 0 and (step + 1 - WARM_UP) % given.every == 0 and step >= WARM_UP:
            kept.append((len(times) - 1, way.common))
    if rank:
        return {}
    compute_s, sent = model.compute_s, way.sent - sent
    own = model.flat.copy()
    *found, last = accuracy(model, [*(flat for _, flat in kept), own], given.images)
    return {
        "times": [at - times[0] for at in times],
        "accuracy": [(number, one) for (number, _), one in zip(kept, found, strict=True)],
        "own": last,  # of the last parameters of rank 0
        "sent": sent,
        "compute_s": compute_s / given.steps,
        "parameters": model.flat.size,
    }


if __name__ == "__main__":
    given = arguments(
        method="dense", steps=100, every=10, batch=32, lr=0.05, momentum=0.9, images=10_000,
        by_label=False, update_ratio=64, reset_ratio=8, reset_every=8, tls=False,
    )  # fmt: skip
    with connect(given) as c:
        warm = hoplite_mp.Event()
        ranks = c.spmd(train, given.hosts, given, warm)
        warm.wait()
        say("begun")
        c.wait(ranks)
        say("ended")
        say("result", **ranks[0].result())
