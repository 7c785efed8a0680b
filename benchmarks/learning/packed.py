"""Broadcasts over eight random link matrices: packed trees, stripes, a chain, and the bound.

The hosts, their engines and the network are simulated, so the figures are the same in each run. The
plans, and the trees, are those of the planner that clusters have.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from hoplite_mp._common.ids import pack_id, pack_local
from hoplite_mp._planner.packed_trees import maximum_flow
from hoplite_mp._planner.packing import pack
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.stripe_plan import single_vertex
from hoplite_mp._protocol.messages import (
    Distribute,
    HostMeasured,
    LinkMeasured,
    NodeJoined,
    ReduceRequested,
)
from hoplite_mp._simulation.scale.node import HOST_ID_BASE
from hoplite_mp._simulation.scale.scale import ScaleWorld

MIB = 1 << 20
NBYTES = 64 * MIB
HOSTS = 8
RATE, LATENCY_S = 125e6, 100e-6  # each host's link, 1 Gbit/s each way
SIXTEENTHS = (16, 8, 4, 2, 1)  # the rate of a path, in sixteenths of RATE: equally likely
SEEDS = tuple(range(1, 9))  # chosen before the first run
SEEDS_QUICK = SEEDS[:2]
SPEED_MIN, BOUND_MIN = 1.5, 0.9

Matrix = dict[tuple[int, int], int]  # (sender, receiver) -> sixteenths of RATE


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of a broadcast over one matrix. bound: no plan can be faster."""

    packed: float
    stripes: float
    chain: float
    bound: float
    trees: int


def matrix(seed: int, hosts: int = HOSTS) -> Matrix:
    """A random matrix; each direction of a path is drawn for itself."""
    draw = random.Random(seed)
    pairs = [(one, other) for one in range(hosts) for other in range(hosts) if one != other]
    return {pair: draw.choice(SIXTEENTHS) for pair in pairs}


def bound(paths: Matrix, hosts: int = HOSTS) -> float:
    """Bytes a second that no broadcast from host 0 exceeds: the smallest maximum flow to a host
    (Edmonds 1973), and the sum of what all hosts can send, since each byte is sent once to each
    receiver."""
    full = max(SIXTEENTHS)
    links = Counter({(hosts + one, 2 * hosts + other): n for (one, other), n in paths.items()})
    links |= Counter({(host, hosts + host): full for host in range(hosts)})
    links |= Counter({(2 * hosts + host, host): full for host in range(hosts)})
    flow = min(maximum_flow(links, host, full) for host in range(1, hosts))
    sent = [
        min(full, sum(paths[one, other] for other in range(1, hosts) if other != one))
        for one in range(hosts)
    ]
    return min(flow, sum(sent) / (hosts - 1)) / full * RATE


def plans(paths: Matrix, hosts: int = HOSTS) -> tuple[Distribute, Distribute]:
    """(the plan by stripes, before trees are packed; the plan by packed trees) of the planner."""
    planner = Planner()
    for node in range(hosts):
        planner.step(NodeJoined(HOST_ID_BASE + node, 1, 1), 0.0)
        planner.step(HostMeasured(node, RATE, RATE), 0.0)
    for (one, other), sixteenths in paths.items():
        if sixteenths < max(SIXTEENTHS):
            rate = sixteenths / max(SIXTEENTHS) * RATE
            planner.step(LinkMeasured(one, other, None, rate), 0.0)
    found: list[Distribute] = []
    for number in (1, 2):
        object_id = pack_id(HOST_ID_BASE, pack_local(1, number, 1))
        request = ReduceRequested(
            number, 0, 1, (object_id,), "sum", 1, kind="broadcast", ready=(0,),
            ready_nbytes=(NBYTES,), ready_layouts=(b"",), ready_holders=((0,),),
        )  # fmt: skip
        step = planner.step(request, 0.0)
        (plan,) = {one for _, one in step.sends if isinstance(one, Distribute)}
        found.append(plan)
        for wanted in step.packing:
            planner.step(pack(wanted), 0.0)
    stripes, packed = found
    if stripes.rule != "stripes" or packed.rule != "parents":
        raise RuntimeError(f"the planner chose {stripes.rule} and {packed.rule}")
    return stripes, packed


def played(plan: Distribute, paths: Matrix, hosts: int = HOSTS) -> float:
    """Bytes a second of the plan over these paths."""
    world = ScaleWorld(hosts, RATE, latency_s=LATENCY_S)
    for (one, other), sixteenths in paths.items():
        if sixteenths < max(SIXTEENTHS):
            world.network.narrow_path(one, other, sixteenths / max(SIXTEENTHS) * RATE)
    return plan.nbytes / world.play(plan)


def speeds(seed: int) -> Speeds:
    """All plans over one matrix."""
    paths = matrix(seed)
    stripes, packed = plans(paths)
    changes: dict[str, Any] = {"parents": (), "stripes": single_vertex(0), "rule": "tree:1"}
    chain = msgspec.structs.replace(stripes, **changes)
    rates = [played(plan, paths) for plan in (packed, stripes, chain)]
    return Speeds(*rates, bound=bound(paths), trees=len(packed.parents))


def measured(quick: bool) -> Outcome:
    """The medians over the matrices, and each matrix as a point of the figure."""
    seeds = SEEDS_QUICK if quick else SEEDS
    found = [speeds(seed) for seed in seeds]

    def median(name: str, other: str) -> float:
        return statistics.median(getattr(one, name) / getattr(one, other) for one in found)

    kind = "ratio of rates, median"
    slowest = min(found, key=lambda one: one.packed / one.bound)
    measures = [
        Measure("packed trees ÷ stripes", median("packed", "stripes"), kind, SPEED_MIN),
        Measure("packed trees ÷ bound", median("packed", "bound"), kind, BOUND_MIN),
        Measure("packed trees ÷ chain", median("packed", "chain"), kind),
        Measure("stripes ÷ bound", median("stripes", "bound"), kind),
        Measure("packed trees ÷ bound, lowest of all", slowest.packed / slowest.bound, "ratio"),
        Measure("packed trees ÷ stripes, lowest of all",
                min(one.packed / one.stripes for one in found), "ratio"),
        Measure("trees of a broadcast, most of all", max(one.trees for one in found), "trees"),
    ]  # fmt: skip
    lines = [
        Line(label, [(seed, getattr(one, name) / 1e6) for seed, one in zip(seeds, found, strict=True)])
        for label, name in (
            ("bound", "bound"),
            ("packed trees", "packed"),
            ("stripes", "stripes"),
            ("chain", "chain"),
        )
    ]  # fmt: skip
    setup = {
        "hosts": HOSTS, "link of a host": "1 Gbit/s each way, simulated",
        "paths": "1, 1/2, 1/4, 1/8 or 1/16 of that, equally likely, for each direction of a pair",
        "latency": "100 µs", "MiB": NBYTES // MIB, "seeds": ", ".join(map(str, seeds)),
        "Gloo": "left out: it has no simulated network",
    }  # fmt: skip
    limits = [
        "On a star, where only the links of hosts limit, stripes reach the bound, and the planner "
        "uses them.",
        "The rates of all narrow paths are given here. A cluster measures them in its first "
        "broadcasts, which use stripes.",
        "Trees are packed for at most 16 hosts, and the first broadcast does not wait for them.",
    ]  # fmt: skip
    return Outcome(measures, setup, limits, lines, x="seed of the link matrix", y="MB/s, broadcast")


EXPERIMENT = Experiment(
    "packed",
    "Packed trees over random links",
    "Blink (MLSys 2020): up to 8× faster model synchronization than NCCL",
    measured,
)
