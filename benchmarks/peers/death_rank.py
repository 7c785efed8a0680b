"""One rank of a peer, of which one will die: three allreduces, and their errors.

It shows how Gloo and Open MPI react to the death of a host during a call, on the same hosts as this
library. Appends a line of JSON to FOLDER/RANK for each call: its start and end (seconds of the
monotonic clock, which all emulated hosts share), and its error, if any."""

from __future__ import annotations

import datetime
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = 3
CALL_S_MAX = 120.0
"""After which Gloo gives up by itself; its default is half an hour."""
TEXT_CHARS_MAX = 200


def gloo(address: str, size: int, rank: int, mine: np.ndarray) -> tuple[Callable[[], object], ...]:
    """(barrier, allreduce)"""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        world_size=size,
        rank=rank,
        timeout=datetime.timedelta(seconds=CALL_S_MAX),
    )
    given = torch.from_numpy(mine)
    return dist.barrier, lambda: dist.all_reduce(given)


def mpi(mine: np.ndarray) -> tuple[int, Callable[[], object], Callable[[], object]]:
    """(rank, barrier, allreduce)"""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    result = np.empty_like(mine)
    return world.Get_rank(), world.Barrier, lambda: world.Allreduce(mine, result)


def main() -> None:
    """Arguments: gloo FOLDER BYTES ADDRESS SIZE RANK, or mpi FOLDER BYTES."""
    peer, folder, nbytes, *place = sys.argv[1:]
    mine = np.ones(int(nbytes) // 4, np.float32)
    if peer == "gloo":
        address, size, rank = place[0], int(place[1]), int(place[2])
        barrier, allreduce = gloo(address, size, rank, mine)
    else:
        rank, barrier, allreduce = mpi(mine)
    with (Path(folder) / str(rank)).open("a", buffering=1) as log:
        for call in range(CALLS):
            barrier()
            if call == CALLS - 1 and rank == 0:
                (Path(folder) / "begun").touch()
            begun, error = time.monotonic(), ""
            try:
                allreduce()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"[:TEXT_CHARS_MAX]
            print(json.dumps([begun, time.monotonic(), error]), file=log)


if __name__ == "__main__":
    main()
