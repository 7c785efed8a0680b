"""How do I train synchronously on several hosts when a rank may die?

Each rank is a member of `spmd`, one per host. When a rank is killed, the other ranks continue. The
rank is restarted, takes over the weights, the optimizer's state and the step number, and takes part
from then on.

Needs: torch
"""

import os
import signal

import torch

import hoplite_mp
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from examples.applications.synchronous_training.training import WARM_UP, Data, Model, Record
from hoplite_mp.integrations.torch import DistributedDataParallel

VICTIM = 1


def train(rank, given, warm):
    model, data, record = Model(given.megabytes), Data(rank, given.hosts), Record()
    optimizer = model.optimizer()
    try:
        # Last, because from now on the other ranks wait for this one.
        group = hoplite_mp.current().group("training", given.hosts, rank)
        ddp = DistributedDataParallel(model, group=group, state={"optimizer": optimizer})
    except hoplite_mp.PeerLostError:
        return None  # rejoined too late: all other ranks have finished
    while ddp.step_number < given.steps:
        step = ddp.step_number
        if rank == 0 and step == WARM_UP:
            warm.set()
        images, labels = data.batch(step)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp(images), labels)
        if rank == VICTIM and step == given.kill_at:  # the rank rejoins after this step
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # gradients are sent during this call
        optimizer.step()
        record.note(loss, len(ddp.contributors))
    return vars(record)


if __name__ == "__main__":
    given = arguments(megabytes=5, steps=100, kill_at=None, tls=False)
    with connect(given) as c:
        warm = hoplite_mp.Event()
        ranks = c.spmd(train, given.hosts, given, warm)
        warm.wait()
        say("begun")
        c.wait(ranks)
        say("ended")
        say("result", **ranks[0].result())
