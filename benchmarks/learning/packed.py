"""Broadcasts over eight random link matrices: packed trees, stripes, a chain, and the bound.

The shipped planner makes the plans and the trees. A model of the engine plays each plan, and so do
real nodes with the compiled engine in virtual time. Both are simulations, so no figure depends on
the machine.
"""

from __future__ import annotations

import logging
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
import numpy as np

from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from hoplite_mp._common.ids import pack_id, pack_local
from hoplite_mp._planner.packing import pack
from hoplite_mp._planner.planner_core import Planner
from hoplite_mp._planner.tree_shapes import single_vertex
from hoplite_mp._protocol.messages import (
    Distribute,
    HostMeasured,
    LinkMeasured,
    NodeJoined,
    ReduceRequested,
)
from hoplite_mp._simulation import runs
from hoplite_mp._simulation.interconnects.packed_trees import maximum_flow
from hoplite_mp._simulation.scale.node import HOST_ID_BASE
from hoplite_mp._simulation.scale.scale import ScaleWorld

if TYPE_CHECKING:
    from hoplite_mp._simulation.network import VirtualNetwork
    from hoplite_mp._simulation.workloads.workload import Workload

MIB = 1 << 20
NBYTES = 64 * MIB
HOSTS = 8
RATE, LATENCY_S = 125e6, 100e-6  # each host's link, 1 Gbit/s each way
SIXTEENTHS = (16, 8, 4, 2, 1)  # the rate of a path, in sixteenths of RATE: equally likely
SEEDS = tuple(range(1, 9))  # chosen before the first run
SEEDS_QUICK = SEEDS[:2]
SPEED_MIN, BOUND_MIN = 1.5, 0.9
RUN_SEED = 3  # of runs of real nodes; without faults it changes nothing of interest
ROUNDS = 4  # the first by stripes
NODES_NBYTES = 32 * MIB  # of a broadcast of real nodes, which move real bytes
REST_S = 20.0  # virtual seconds in which trees are packed, and the last array is dropped

Matrix = dict[tuple[int, int], int]  # (sender, receiver) -> sixteenths of RATE


@dataclass(frozen=True)
class Speeds:
    """Bytes a second of a broadcast over one matrix. bound: no plan can be faster."""

    packed: float
    stripes: float
    chain: float
    bound: float
    trees: int
    nodes_packed: float  # by real nodes
    nodes_stripes: float


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
    real = by_nodes(paths)
    return Speeds(
        *rates,
        bound=bound(paths),
        trees=len(set(packed.parents)),
        nodes_packed=statistics.median(rate for shape, rate in real if shape == "packed trees"),
        nodes_stripes=statistics.median(rate for shape, rate in real if shape == "stripes"),
    )


def by_nodes(paths: Matrix) -> list[tuple[str, float]]:
    """(shape, bytes a second) of broadcasts by real nodes in virtual time, one after another. The
    manager knows the rates of the paths from the beginning, as after measurements."""
    found: list[tuple[str, float]] = []

    def narrow(network: VirtualNetwork, _: random.Random) -> dict[tuple[int, int], float]:
        rates = {pair: n / max(SIXTEENTHS) * RATE for pair, n in paths.items()}
        rates = {pair: rate for pair, rate in rates.items() if rate < RATE}
        for (one, other), rate in rates.items():
            network.narrow_path(one, other, rate)
        return rates

    def program(c: Any) -> None:
        nodes = [node for node in c.nodes if node.workers]
        for _ in range(ROUNDS):
            array = c.put(np.ones(NODES_NBYTES, np.uint8))
            c.broadcast(array, to=nodes).result()
            plan = c.explain(array).plans[-1]
            found.append((plan.shape, NODES_NBYTES / plan.elapsed_s))
            del array
            time.sleep(REST_S)

    def begin(work: Workload) -> None:
        work.program(work.hosts()[0], "broadcasts", program)

    changes = {
        "_rates": lambda _, count: iter([RATE] * count), "_narrow": narrow, "KNOWN_RUNS": 1.0,
        "STORES": runs.STORES[:1], "DISKS": runs.DISKS[:1],
    }  # fmt: skip
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with mock.patch.multiple(runs, **changes):
            outcome = runs.run_seed(RUN_SEED, nodes=HOSTS, faults=False, begin=begin)
    finally:
        logging.disable(level)
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    return found


def measured(quick: bool) -> Outcome:
    """The medians over the matrices, and each matrix as a point of the figure."""
    seeds = SEEDS_QUICK if quick else SEEDS
    found = [speeds(seed) for seed in seeds]

    def median(name: str, other: str) -> float:
        return statistics.median(getattr(one, name) / getattr(one, other) for one in found)

    kind = "ratio of rates, median"
    lowest = min(one.packed / one.bound for one in found)
    measures = [
        Measure("packed trees ÷ stripes", median("packed", "stripes"), kind, SPEED_MIN),
        Measure("packed trees ÷ bound", median("packed", "bound"), kind, BOUND_MIN),
        Measure("packed trees ÷ chain", median("packed", "chain"), kind),
        Measure("stripes ÷ bound", median("stripes", "bound"), kind),
        Measure("packed trees ÷ bound, lowest of all", lowest, "ratio of rates"),
        Measure(
            "real nodes in virtual time: packed trees ÷ stripes",
            median("nodes_packed", "nodes_stripes"), kind, SPEED_MIN,
        ),
        Measure(
            "real nodes in virtual time: packed trees ÷ bound",
            median("nodes_packed", "bound"), kind, BOUND_MIN,
        ),
        Measure("trees of a broadcast, most of all", max(one.trees for one in found), "trees"),
    ]  # fmt: skip
    names = {"bound": "bound", "packed trees": "packed", "stripes": "stripes", "chain": "chain"}
    lines = [
        Line(label, [(seed, getattr(found[at], name) / 1e6) for at, seed in enumerate(seeds)])
        for label, name in names.items()
    ]
    setup = {
        "hosts": HOSTS, "link of a host": "1 Gbit/s each way, simulated",
        "paths": "1, 1/2, 1/4, 1/8 or 1/16 of that, equally likely, for each direction of a pair",
        "latency": "100 µs", "MiB": f"{NBYTES // MIB}; {NODES_NBYTES // MIB} by real nodes",
        "seeds": ", ".join(map(str, seeds)),
        "Gloo": "left out: it has no simulated network",
    }  # fmt: skip
    limits = [
        "Streams that share a link alternate by blocks, so a heavy tree has several streams. With "
        "one stream for each tree, the model of the engine reaches 0.80.",
        "Real nodes reach less of the bound: a node sends to its peers in turn, and not in "
        "proportion to the numbers of their streams.",
        "On a star, where only the links of hosts limit, stripes reach the bound, and the planner "
        "uses them.",
        "The rates of all narrow paths are given here. A cluster measures paths in its first "
        "broadcasts, and finds only those that get less than half of a fair share of their links: "
        "where most paths are narrow, it knows too few of them.",
        "Trees are packed for at most 16 hosts, and the first broadcast does not wait for them.",
    ]  # fmt: skip
    return Outcome(measures, setup, limits, lines, x="seed of the link matrix", y="MB/s, broadcast")


EXPERIMENT = Experiment(
    "packed",
    "Packed trees over random links",
    "Blink (MLSys 2020): up to 8× faster model synchronization than NCCL",
    measured,
)
