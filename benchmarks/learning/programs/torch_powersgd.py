"""torch's DistributedDataParallel over Gloo with its PowerSGD hook: the peer of `gradients`.

Each host runs one rank as a program. The initial parameters, the batches and the learning rate are
the same as in `gradients`.

Needs: torch
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.nn.parallel import DistributedDataParallel

from benchmarks.learning.programs.perceptron import Perceptron, Shard, accuracy
from examples.applications.running import arguments, say

WARM_UP = 3
BUCKET_MB = 100
START = 2  # the first iteration that is compressed: the least that the hook allows


def network(model: Perceptron) -> torch.nn.Sequential:
    """The layers of the perceptron with the same initial parameters."""
    layers: list[torch.nn.Module] = []
    for (weights, _), (bias, _) in zip(model.pairs[::2], model.pairs[1::2], strict=True):
        linear = torch.nn.Linear(*weights.shape)
        with torch.no_grad():
            linear.weight.copy_(torch.from_numpy(weights.T.copy()))
            linear.bias.copy_(torch.from_numpy(bias))
        layers += [linear, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def store(net: torch.nn.Sequential, model: Perceptron) -> None:
    """Copies the parameters of the network into `model`."""
    parameters = [one.detach().numpy() for one in net.parameters()]
    for (mine, _), theirs in zip(model.pairs, parameters, strict=True):
        mine[...] = theirs.T


def train(given: Any) -> None:
    torch.set_num_threads(1)
    meeting = f"tcp://{given.address}"
    dist.init_process_group("gloo", init_method=meeting, rank=given.rank, world_size=given.hosts)
    model = Perceptron()
    net = network(model)
    # One bucket: the hook waits in Gloo's two threads for further reductions, so with two buckets
    # all ranks wait for ever.
    ddp = DistributedDataParallel(net, bucket_cap_mb=BUCKET_MB)
    if given.low_rank:
        ddp.register_comm_hook(
            powersgd.PowerSGDState(
                None, matrix_approximation_rank=given.low_rank, start_powerSGD_iter=START
            ),
            powersgd.powerSGD_hook,
        )
    shard = Shard(given.rank, given.hosts, given.batch)
    optimizer = torch.optim.SGD(net.parameters(), given.lr, given.momentum)
    kept, times = [], []
    for step in range(given.steps + WARM_UP):
        if step == WARM_UP:
            dist.barrier()
            if given.rank == 0:
                say("begun")
            times.append(time.monotonic())
        x, labels = shard.next()
        optimizer.zero_grad()
        output = ddp(torch.from_numpy(x))
        torch.nn.functional.cross_entropy(output, torch.from_numpy(labels).long()).backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(time.monotonic())
            if given.rank == 0 and (step + 1 - WARM_UP) % given.every == 0:
                store(net, model)
                kept.append((len(times) - 1, model.flat.copy()))
    dist.barrier()
    if given.rank == 0:
        say("ended")
        found = accuracy(model, [flat for _, flat in kept], given.images)
        pairs = [(number, one) for (number, _), one in zip(kept, found, strict=True)]
        say("result", times=[at - times[0] for at in times], accuracy=pairs)


if __name__ == "__main__":
    train(
        arguments(
            rank=0, low_rank=4, steps=100, every=10, batch=32, lr=0.05, momentum=0.9, images=10_000
        )
    )
