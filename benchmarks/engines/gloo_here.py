"""`python -m benchmarks.engines.gloo_here [-n 2 4]`: a Group, torch over it, and Gloo.

Needs the environment of the engines (`make bench-gloo`), and one host. Each rank is a process of
`spmd`, in which a Group, torch.distributed over this library and torch.distributed over Gloo take
turns, so all three run on the same machine at the same time. A row has the median, at rank 0, of
the time of one call; the last row has a step of DistributedDataParallel. All results are written to
benchmarks/results/gloo-here-N.json."""

from __future__ import annotations

import argparse
import functools
import json
import os
import socket
import statistics
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from benchmarks.common import ROOT, Row
from benchmarks.report import table as drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZES = (4, 4096, 32 << 10, 100_000, 400_000, 1_200_000, 4_000_000, 16_000_000, 64_000_000)
KINDS = ("allreduce", "allgather", "reduce_scatter", "broadcast")
GROUP_MAX, TORCH_MAX, STEP_MAX = 0.8, 0.9, 1.0
ROW_S = 1.0
ROUNDS_MIN, ROUNDS_MAX = 3, 200
BYTES_IN_A_ROW = 2_000_000  # a round makes so many calls that they carry about this much
CALLS_IN_A_ROW = 50
WIDTH = 512  # of the two layers of the model: 0.5 M parameters


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engines.gloo_here", description=__doc__
    )
    parser.add_argument("-n", type=int, nargs="*", default=[2, 4], help="ranks (%(default)s)")
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="bytes")
    options = parser.parse_args(arguments)
    for size in options.n:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        about = size, port, tuple(options.kinds), tuple(options.sizes)
        with hoplite_mp.Cluster(workers=0) as cluster:
            found = cluster.get(cluster.spmd(rank_of, size, *about))[0]
        rows = [row for one in found for row in rows_of(size, *one)]
        made = [row.as_dict() for row in rows]
        print(drawn(made), flush=True)
        place = ROOT / "benchmarks" / "results" / f"gloo-here-{size}.json"
        place.parent.mkdir(exist_ok=True)
        place.write_text(json.dumps(made, indent=1))
    return 0


def rows_of(ranks: int, kind: str, nbytes: int, seconds: dict[str, float]) -> list[Row]:
    """The rows of the table for one call."""
    rows = []
    gloo = seconds["gloo"]
    for name, limit in (("group", GROUP_MAX), ("torch", TORCH_MAX), ("step", STEP_MAX)):
        if name in seconds:
            title = f"{kind}, {nbytes} bytes, {ranks} ranks: {name}"
            about = seconds[name], "s", "Gloo", gloo, seconds[name] / gloo, limit
            rows.append(Row(title, *about))
    return rows


def rank_of(
    rank: int, size: int, port: int, kinds: tuple[str, ...], sizes: tuple[int, ...]
) -> list[tuple[str, int, dict[str, float]]]:
    """What one rank has measured: (kind, bytes, seconds of a call by name)."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size
    )
    ours = dist.new_group(backend="hoplite")
    group = hoplite_mp.current().group("beside Gloo", size, rank)
    found = []
    for kind in kinds:
        for nbytes in sizes:
            calls = calls_of(kind, max(1, nbytes // 4), size, group, ours)
            in_a_row = max(1, min(CALLS_IN_A_ROW, BYTES_IN_A_ROW // nbytes))
            found.append((kind, nbytes, medians(calls, in_a_row)))
    found.append(("DDP step", 8 * WIDTH * WIDTH, medians(steps(ours), 10)))
    group.close()
    return found


def calls_of(
    kind: str, elements: int, size: int, group: Any, ours: Any
) -> dict[str, Callable[[], Any]]:
    """One call of each of the three, over arrays that are made here."""
    import torch
    import torch.distributed as dist

    elements = -(-elements // size) * size
    array, tensor = np.zeros(elements, np.float32), torch.zeros(elements)
    if kind == "allreduce":
        return {
            "gloo": functools.partial(dist.all_reduce, tensor),
            "group": lambda: group.allreduce(array, out=array),
            "torch": functools.partial(dist.all_reduce, tensor, group=ours),
        }
    if kind == "broadcast":
        return {
            "gloo": functools.partial(dist.broadcast, tensor, 0),
            "group": lambda: group.broadcast(array, 0, out=array),
            "torch": functools.partial(dist.broadcast, tensor, 0, group=ours),
        }
    if kind == "allgather":
        outs = [np.zeros(elements, np.float32) for _ in range(size)]
        tensors = [torch.zeros(elements) for _ in range(size)]
        return {
            "gloo": functools.partial(dist.all_gather, tensors, tensor),
            "group": lambda: group.allgather(array, out=outs),
            "torch": functools.partial(dist.all_gather, tensors, tensor, group=ours),
        }
    out, section = np.zeros(elements // size, np.float32), torch.zeros(elements // size)
    return {
        "gloo": functools.partial(dist.reduce_scatter_single, section, tensor),
        "group": lambda: group.reduce_scatter(array, out=out),
        "torch": functools.partial(dist.reduce_scatter_single, section, tensor, group=ours),
    }


def steps(ours: Any) -> dict[str, Callable[[], Any]]:
    """Forward and backward of a small model, whose gradients are averaged."""
    import torch

    given = torch.ones(8, WIDTH)

    def step(model: Any) -> None:
        model(given).sum().backward()
        model.zero_grad(set_to_none=False)

    def made(**kwargs: Any) -> Callable[[], Any]:
        layers = torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), **kwargs)
        return functools.partial(step, model)

    return {"gloo": made(), "step": made(process_group=ours)}


def medians(calls: dict[str, Callable[[], Any]], in_a_row: int) -> dict[str, float]:
    """Seconds of one call of each, which take turns."""
    import torch
    import torch.distributed as dist

    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    until = time.monotonic() + ROW_S
    for number in range(ROUNDS_MAX):
        for name, call in calls.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(in_a_row):
                call()
            times[name].append((time.perf_counter() - begun) / in_a_row)
        over = torch.tensor(float(number + 1 >= ROUNDS_MIN and time.monotonic() > until))
        dist.broadcast(over, 0)
        if over:
            break
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    raise SystemExit(main())
