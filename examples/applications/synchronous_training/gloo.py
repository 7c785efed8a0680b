"""The same with torch's own DistributedDataParallel, on Gloo. Every rank is a separate program
on its host; without `rank`, this program is rank 0, and starts the other ranks on this host.

Needs: torch
"""

import json
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples.applications.running import arguments, say
from examples.applications.synchronous_training.training import WARM_UP, Data, Model, Record

VICTIM = 1
HERE = "127.0.0.1:29400"


def train(rank, given):
    meeting = f"tcp://{given.address or HERE}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=given.hosts)
    model, data, record = Model(given.megabytes), Data(rank, given.hosts), Record()
    optimizer = model.optimizer()
    ddp = DistributedDataParallel(model)
    error = None
    for step in range(given.steps):
        if rank == 0 and step == WARM_UP:
            say("begun")
        images, labels = data.batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        if rank == VICTIM and step == given.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            loss.backward()  # gradients are sent during this call
        except RuntimeError as lost:  # all ranks end here: the world size is fixed
            error = f"in step {step}: {lost}"
            break
        optimizer.step()
        record.note(loss, given.hosts)
    if rank == 0:
        say("ended")
        say("result", error=error, **vars(record))


if __name__ == "__main__":
    given = arguments(megabytes=5, steps=100, kill_at=None, rank=None)
    others = []
    if given.rank is None:
        for rank in range(1, given.hosts):
            told = json.dumps(vars(given) | {"rank": rank})
            others.append(subprocess.Popen([sys.executable, "-m", __spec__.name, told]))
    train(given.rank or 0, given)
    for other in others:
        other.wait()
