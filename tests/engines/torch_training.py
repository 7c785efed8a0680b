"""Ranks of a training run of which one is killed: a small model, and notes in files."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

import hoplite_mp

SIZE = 3
DIES_AT = 5  # the step in which one rank kills itself, between its forward and backward pass


class Step(NamedTuple):
    number: int
    loss: float
    contributors: tuple[int, ...]
    digest: str  # of weights, buffers and state when its forward pass begins


def model_of(rank: int) -> Any:
    """Ranks begin with different weights: what they have in common they got from each other."""
    import torch

    torch.manual_seed(rank)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64),
        torch.nn.BatchNorm1d(64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 1),
    )


def data_of(rank: int, step: int) -> tuple[Any, Any]:
    import torch

    made = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 8, generator=made)
    return x, x.sum(1, keepdim=True) + 0.1 * x[:, :1] ** 2


def train(rank: int, folder: str, steps: int, victim: int | None, late: bool = False) -> Any:
    """Returns (pid, what each step was, a digest of all weights and of the optimizer's state).
    `victim`: the rank that dies; the others wait in the middle of the steps until it has come back,
    or, if it is to be `late`, it comes back when they have finished."""
    import torch

    from hoplite_mp.integrations.torch import DistributedDataParallel

    torch.set_num_threads(1)
    notes = Path(folder)
    again = bool(list(notes.glob(f"comes-{rank}.*")))
    while again and late and len(list(notes.glob("ends-*"))) < SIZE - 1:
        time.sleep(0.01)
    group = hoplite_mp.current().group("training", SIZE, rank)
    (notes / f"comes-{rank}.{os.getpid()}").touch()  # its first call is waited for from now on
    model = model_of(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp = DistributedDataParallel(
        model, group=group, state={"optimizer": optimizer}, bucket_cap_mb=0.001
    )
    steps_made: list[Step] = []
    seen: list[str] = []
    model.register_forward_pre_hook(lambda *_: seen.append(digest_of(model, optimizer, True)))
    while ddp.step_number < steps:
        step = ddp.step_number
        if victim is not None and not late and step == steps // 2:
            while len(list(notes.glob(f"comes-{victim}.*"))) < 2:
                time.sleep(0.01)
        x, y = data_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        if rank == victim and not again and step == DIES_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        steps_made.append(Step(step, loss.item(), ddp.contributors, seen[-1]))
    (notes / f"ends-{rank}").touch()
    return os.getpid(), steps_made, digest_of(model, optimizer, False)


def digest_of(model: Any, optimizer: Any, buffers: bool) -> str:
    """Of all weights and the optimizer's state; and of the buffers, which are the same on all ranks
    when a forward pass begins, and each rank's own when it ends."""
    import hashlib

    import torch

    digest = hashlib.sha256()
    tensors = [*model.parameters(), *(model.buffers() if buffers else ())]
    for one in optimizer.state_dict()["state"].values():
        tensors += [one[name] for name in sorted(one)]
    for tensor in tensors:
        digest.update(torch.as_tensor(tensor).detach().numpy().tobytes())
    return digest.hexdigest()
