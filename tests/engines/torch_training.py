"""Ranks of a training run that tests kill: a small model, and notes of who is where in files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import hoplite_mp

SIZE = 3
WAITS_S = 0.02  # of a step, so that a test finds the place where it wants to kill


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


def train(rank: int, folder: str, steps: int, waits_for: int | None) -> Any:
    """Returns (pid, what each step was, a digest of all weights and of the optimizer's state).
    `waits_for`: in the middle of the steps the others wait until this rank has come back."""
    import torch

    from hoplite_mp.integrations.torch import DistributedDataParallel

    torch.set_num_threads(1)
    notes = Path(folder)
    (notes / f"comes-{rank}.{os.getpid()}").touch()
    group = hoplite_mp.current().group("training", SIZE, rank)
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
        if waits_for is not None and step == steps // 2:
            while len(list(notes.glob(f"comes-{waits_for}.*"))) < 2:
                time.sleep(0.01)
            time.sleep(WAITS_S)
        x, y = data_of(rank, step)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        (notes / f"step-{rank}").write_text(str(step))
        optimizer.step()
        steps_made.append(Step(step, loss.item(), ddp.contributors, seen[-1]))
        time.sleep(WAITS_S)
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
