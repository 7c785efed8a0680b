"""How does training with torch continue when one of its processes is killed?

Three ranks train one model. Rank 1 is killed in the middle and rejoins. The other ranks continue
without it, then send it the weights, the optimizer's state and the step number.

Needs: torch.
"""

import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hoplite_mp

RANKS, STEPS = 3, 150


def batch(step: int, rank: int):
    """A rank's data for a step: four numbers and their sum."""
    import torch

    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step * RANKS + rank))
    return x, x.sum(1, keepdim=True)


def train(rank: int, folder: Path):
    import torch

    from hoplite_mp.integrations.torch import DistributedDataParallel

    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    group = hoplite_mp.current().group("training", RANKS, rank)
    note = folder / f"rank{rank}-{os.getpid()}"  # the current step, for kill_rank_1
    note.touch()
    ddp = DistributedDataParallel(model, group=group, state={"optimizer": optimizer})
    began = ddp.step_number
    alone = set()
    while ddp.step_number < STEPS:
        if ddp.step_number == STEPS // 2:  # wait until rank 1 has restarted
            while len(list(folder.glob("rank1-*"))) < 2:
                time.sleep(0.01)
        note.write_text(str(ddp.step_number))
        x, y = batch(ddp.step_number, rank)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        alone.add(ddp.contributors)
        time.sleep(0.01)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return began, loss.item(), sorted(alone), weights


def kill_rank_1(folder: Path, ranks: list) -> None:
    while not any(rank.done() for rank in ranks):  # a failed rank raises below
        for path in folder.glob("rank1-*"):
            if int(path.read_text() or 0) > 10:
                os.kill(int(path.name.split("-")[1]), signal.SIGKILL)
                return
        time.sleep(0.01)


if __name__ == "__main__":
    with TemporaryDirectory() as name, hoplite_mp.Cluster(workers=0) as cluster:
        ranks = cluster.spmd(train, RANKS, Path(name))
        kill_rank_1(Path(name), ranks)
        results = [rank.result() for rank in ranks]
    for rank, (began, loss, contributors, weights) in enumerate(results):
        print(f"rank {rank}: from step {began}, loss {loss:.4f}, who took part: {contributors}")
        assert weights.equal(results[0][3]), "all have the same weights, bit for bit"
