"""The same allreduces by torch over Gloo: one process on each host."""

import datetime
import time

import torch
import torch.distributed as dist

from benchmarks.learning.programs.bounded import WARM_UP
from examples.applications.running import arguments, say

PORT = 29500


def main():
    given = arguments(rank=0, items=1 << 20, calls=50, pause=0.05, first="")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{given.first}:{PORT}",
        rank=given.rank,
        world_size=given.hosts,
        timeout=datetime.timedelta(seconds=120),
    )
    took = []
    for call in range(WARM_UP + given.calls):
        if call == WARM_UP:
            dist.barrier()
            say("begun")
        x = torch.full((given.items,), given.rank + 1.0)
        since = time.monotonic()
        dist.all_reduce(x)
        took.append(time.monotonic() - since)
        time.sleep(given.pause)
    every = [None] * given.hosts
    dist.all_gather_object(every, took[WARM_UP:])
    say("ended")
    say("result", took=every)


if __name__ == "__main__":
    main()
