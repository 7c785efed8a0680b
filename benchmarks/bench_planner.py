"""The planner's time per message in a cluster of a thousand nodes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.common import Row, measure, median
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._protocol import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NODES = 1000
NBYTES = 64 << 20
FETCHES = 300


def object_id(number: int) -> bytes:
    """An object of the host with id 1."""
    return (1).to_bytes(8, "little") + number.to_bytes(8, "little")


def cluster(nodes: int = NODES) -> Planner:
    """A planner with that many nodes; half of them have measured their links."""
    planner = Planner()
    for number in range(nodes):
        planner.step(m.NodeJoined(number + 1, 1, 8), 0.0)
        if number % 2:
            planner.step(m.HostMeasured(number, 1e8 + number, 1e8), 0.0)
    return planner


def timed(planner: Planner, messages: Sequence[m.NodeToManager]) -> float:
    """Seconds for all of these."""
    began = time.perf_counter()
    for message in messages:
        planner.step(message, 0.0)
    return time.perf_counter() - began


def reduction(kind: str, number: int, nodes: int) -> list[m.NodeToManager]:
    """A collective of one ref a node, but the last arrival, which starts it."""
    refs = tuple(object_id(i) for i in range(nodes))
    to = () if kind == "allreduce" else (0,)
    ask = m.ReduceRequested(number, 0, 1, refs, "sum", nodes, kind=kind, to=to)
    return [ask, *(m.SourceReady(number, i, i, NBYTES) for i in range(nodes - 1))]


def bench_planner(benchmark, rounds, record):
    """Seconds a message, and seconds a node for the start of an operation."""
    per_message: dict[str, list[float]] = {}
    starts: dict[str, list[float]] = {}
    planner = cluster()
    numbers = iter(range(1, 1 << 30))

    def note(table: dict[str, list[float]], title: str, value: float) -> None:
        table.setdefault(title, []).append(value)

    def fold(kind: str) -> None:
        number = next(numbers)
        early = reduction(kind, number, NODES)
        note(per_message, f"{kind}: a source becomes ready", timed(planner, early) / len(early))
        last = m.SourceReady(number, NODES - 1, NODES - 1, NBYTES)
        note(starts, f"{kind}: the last source starts it", timed(planner, [last]) / NODES)
        done = [m.StripesComplete(number, 1, node) for node in range(NODES)]
        note(per_message, f"{kind}: a node is complete", timed(planner, done) / len(done))

    def broadcast() -> None:
        number = next(numbers)
        one = object_id(number)
        ask = m.ReduceRequested(number, 0, 1, (one,), "sum", 1, kind="broadcast")
        planner.step(ask, 0.0)
        ready = m.SourceReady(number, 0, 0, NBYTES)
        began = time.perf_counter()
        plan = planner.step(ready, 0.0)
        note(starts, "broadcast", (time.perf_counter() - began) / NODES)
        epoch = next(s.epoch for _, s in plan.sends if isinstance(s, m.Distribute))
        done = [m.FetchComplete(node, one, epoch) for node in range(1, NODES)]
        note(per_message, "broadcast: a copy is complete", timed(planner, done) / len(done))
        planner.step(m.ObjectDeleted(one), 0.0)

    def fetches() -> None:
        one = object_id(next(numbers))
        asks = [m.FetchRequested(node, one, NBYTES, (0,)) for node in range(1, FETCHES)]
        note(per_message, "a fetch", timed(planner, asks) / len(asks))
        planner.step(m.ObjectDeleted(one), 0.0)

    def one_round() -> None:
        fold("reduce")
        fold("allreduce")
        broadcast()
        fetches()

    calls: Callable[[], None] = one_round
    measure(benchmark, rounds=rounds(5, 1), prepare=tuple, call=calls, check=lambda _: None)
    for title, values in per_message.items():
        row = Row(f"{title}, a message", median(values), "s")
        row.wanted = 100e-6
        record(row)
    for title, values in starts.items():
        row = Row(f"{title}, a node", median(values), "s")
        row.wanted = 2e-6
        record(row)
