"""One rank of Gloo on one emulated host: calls of torch.distributed, timed one by one.

The counterpart of benchmarks/lan/member.py in the environment with torch. Prints one line of JSON:
for each row the seconds of each round."""

from __future__ import annotations

import datetime
import json
import math
import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from benchmarks.lan.rounds import idle_rate, measured

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.lan.rounds import Array

CALL_S_MAX = 120.0
"""Of one call, and of meeting at the start: the longest rows take 10 s on a quiet machine."""


class GlooRank:
    """This process in the default process group, as a Rank."""

    def __init__(self) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def barrier(self) -> None:
        """Returns when all are here."""
        dist.barrier()

    def prepared(self, kind: str, mine: Array) -> Callable[[], Any]:
        """The call. Gloo writes into what it is given: that is made, and touched, before."""
        given, root = torch.from_numpy(mine), self.rank == 0
        if kind == "barrier":
            return _returning(None, dist.barrier)
        if kind in ("allreduce", "apart"):
            return _returning(mine, dist.all_reduce, given)
        if kind == "broadcast":
            return _returning(mine, dist.broadcast, given, 0)
        if kind == "reduce":
            return _returning(mine if root else None, dist.reduce, given, 0)
        if kind == "send":
            return _returning(None, dist.send, given, 1) if root else (
                _returning(mine, dist.recv, given, 0)
            )  # fmt: skip
        if kind == "reduce_scatter":
            split = list(given.tensor_split(self.size))
            room = torch.full_like(split[self.rank], math.nan)
            return _returning(room.numpy(), dist.reduce_scatter, room, split)
        if kind == "gather" and not root:
            return _returning(None, dist.gather, given, None, 0)
        rooms = [torch.full_like(given, math.nan) for _ in range(self.size)]
        parts = [room.numpy() for room in rooms]
        if kind == "gather":
            return _returning(parts, dist.gather, given, rooms, 0)
        assert kind == "allgather", kind
        return _returning(parts, dist.all_gather, rooms, given)


def _returning(result: Any, call: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """The call, with the result where it will be."""

    def run() -> Any:
        call(*args)
        return result

    return run


def main() -> None:
    """Arguments: address at which rank 0 listens, size, rank, rows as kind:bytes:rounds."""
    address, size, rank, *rows = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}",
        world_size=int(size),
        rank=int(rank),
        timeout=datetime.timedelta(seconds=CALL_S_MAX),
    )
    found = measured(GlooRank(), rows, idle_rate)
    dist.barrier()  # rank 0 serves the others until here
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
