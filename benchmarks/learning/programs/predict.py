"""Synchronous training, and asynchronous training with a parameter server, for predictions.

`python -m benchmarks.learning.programs.predict '{"hosts": 2, "mode": "synchronous"}'`. With
"trace", one worker on this host trains and is traced. Otherwise the server of asynchronous training
is on the first host, and each other host has a worker.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np

import hoplite_mp
from benchmarks.learning.programs.perceptron import Perceptron, Shard
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say

if TYPE_CHECKING:
    from collections.abc import Iterator

WARM_UP = 3
LR = np.float32(0.05)
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Server:
    """The parameters of asynchronous training."""

    def __init__(self) -> None:
        self.flat = Perceptron().flat

    def pull(self) -> np.ndarray[Any, Any]:
        return self.flat

    def push(self, grad: np.ndarray[Any, Any]) -> None:
        self.flat = self.flat - LR * grad


def steps(rank: int, given: Any, warm: Any, times: list[float]) -> Iterator[int]:
    """The numbers of a worker's steps; notes in `times` when the measured ones begin and end."""
    for step in range(given.steps + WARM_UP):
        if step == WARM_UP:
            if rank == 0:
                warm.set()
            times.append(time.monotonic())
        yield step
        if step >= WARM_UP:
            times.append(time.monotonic())


def synchronous(rank: int, ranks: int, given: Any, warm: Any) -> list[float]:
    model, shard = Perceptron(), Shard(rank, ranks, given.batch)
    group = hoplite_mp.current().group("training", ranks, rank)
    times: list[float] = []
    for _ in steps(rank, given, warm, times):
        mean = group.allreduce(model.gradient(*shard.next()), op="mean")
        model.flat -= LR * mean
    return times


def asynchronous(rank: int, ranks: int, given: Any, warm: Any, server: Any) -> list[float]:
    model, shard = Perceptron(), Shard(rank, ranks, given.batch)
    times: list[float] = []
    for _ in steps(rank, given, warm, times):
        model.flat[...] = server.pull().result()
        server.push(model.gradient(*shard.next())).result()
    return times


def exchange(rank: int, ranks: int, given: Any, warm: Any) -> list[float]:
    """Calls without computation, to measure the CPU time of transfers."""
    grad = Perceptron().grad
    group = hoplite_mp.current().group("exchange", ranks, rank)
    times: list[float] = []
    for _ in steps(rank, given, warm, times):
        group.allreduce(grad, op="mean")
    return times


def machine_s() -> tuple[float, float]:
    """CPU seconds of this machine, of all processes and interrupts, and of interrupts alone (for
    example for packets)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *interrupts = map(int, file.readline().split()[1:8])
    return (user + nice + system + sum(interrupts)) * TICK_S, sum(interrupts) * TICK_S


def rate(times: list[list[float]], is_asynchronous: bool) -> float:
    """Steps per second, while all workers train."""
    begin, end = max(one[0] for one in times), min(one[-1] for one in times)
    within = [[at for at in one if begin <= at <= end] for one in times]
    parts = [(len(one) - 1) / (one[-1] - one[0]) for one in within if len(one) > 1]
    return sum(parts) / (1 if is_asynchronous else len(times))


if __name__ == "__main__":
    given = arguments(mode="synchronous", steps=20, batch=128, trace="", tls=False)
    is_asynchronous = given.mode == "asynchronous"
    with connect(given) as c:
        workers = 1 if given.trace else given.hosts - is_asynchronous
        servers: list[Any] = []
        if is_asynchronous:
            servers = [c.options(name="server", node="h0").actor(Server)]
            servers[0].pull().result()
        train = {"synchronous": synchronous, "asynchronous": asynchronous, "exchange": exchange}
        away = is_asynchronous and not given.trace
        place = c.options(resources={"away" if away else "place": 1})
        warm = hoplite_mp.Event()
        with c.trace(given.trace) if given.trace else contextlib.nullcontext():
            ranks = [
                place.submit(train[given.mode], rank, workers, given, warm, *servers)
                for rank in range(workers)
            ]
            warm.wait()
            say("begun")
            begun, before = time.monotonic(), machine_s()
            times = c.get(ranks)
            all_s, interrupts_s = (b - a for a, b in zip(before, machine_s(), strict=True))
            seconds = time.monotonic() - begun
            say("ended")
        more = {"seconds": seconds, "machine_s": all_s, "interrupts_s": interrupts_s}
        say("result", rate=rate(times, is_asynchronous), **more)
