"""Allreduces by trees on interconnects that are no star: a pure simulation in time steps.

No hosts are emulated. `hoplite-mp simulate --topology` shows the same figures.
"""

from __future__ import annotations

from benchmarks.learning.experiment import Experiment, Line, Measure, Outcome
from hoplite_mp._simulation.interconnects.interconnect import interconnect
from hoplite_mp._simulation.interconnects.tree_schedules import PLANS, TreeSchedule, schedule_of

MIB = 1 << 20
NBYTES = 64 * MIB
RATE, LATENCY_S = 125e6, 100e-6  # links of 1 Gbit/s each way
TOPOLOGIES = ("torus:8x8", "mesh:8x8", "fattree:16", "star:16")
SIZES = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)  # MiB
SIZES_QUICK = (1, 64)


def measured(quick: bool) -> Outcome:
    """The plans on each interconnect, and on the torus for several sizes."""
    schedules = {
        name: {plan: schedule_of(plan, interconnect(name)) for plan in PLANS} for name in TOPOLOGIES
    }
    seconds = {
        name: {plan: _seconds(one, NBYTES) for plan, one in plans.items()}
        for name, plans in schedules.items()
    }
    torus, mesh, fat_tree, star = (seconds[name] for name in TOPOLOGIES)
    kind = "ratio of rates"
    steps = schedules["torus:8x8"]["multitree"].steps // 2
    measures = [
        Measure("torus 8×8: MultiTree ÷ one-way ring", _speed(torus, "ring"), kind, 3),
        Measure("torus 8×8: MultiTree ÷ two-way ring", _speed(torus, "two-way-ring"), kind, 1.8),
        Measure("torus 8×8: MultiTree ÷ halving", _speed(torus, "halving"), kind),
        Measure("torus 8×8: MultiTree ÷ two trees", _speed(torus, "twotree"), kind),
        Measure("torus 8×8: MultiTree ÷ packed trees", _speed(torus, "packed"), kind),
        Measure("torus 8×8: steps of MultiTree's allgather; 16 are needed", steps, "steps"),
        Measure("mesh 8×8: MultiTree ÷ two-way ring", _speed(mesh, "two-way-ring"), kind),
        Measure("fat tree of 16: MultiTree ÷ ring", _speed(fat_tree, "ring"), kind),
        Measure("star of 16: MultiTree ÷ ring", _speed(star, "ring"), kind, 1.0),
    ]
    sizes = SIZES_QUICK if quick else SIZES
    lines = [
        Line(plan, [(size, size * MIB / _seconds(one, size * MIB) / 1e6) for size in sizes])
        for plan, one in schedules["torus:8x8"].items()
    ]
    setup = {
        "hosts": ", ".join(TOPOLOGIES), "links": "1 Gbit/s each way, simulated",
        "latency of a step": "100 µs", "MiB": NBYTES // MIB, "seed": "none, nothing is random",
    }  # fmt: skip
    limits = _limits(seconds, schedules["torus:8x8"])
    return Outcome(measures, setup, limits, lines, x="MiB", y="MB/s, allreduce on the torus")


def _seconds(schedule: TreeSchedule, nbytes: float) -> float:
    best = schedule.with_best_blocks(nbytes, RATE, LATENCY_S)
    return best.seconds(nbytes, RATE, LATENCY_S)


def _speed(seconds: dict[str, float], other: str) -> float:
    """MultiTree's speed as a multiple of the other plan's."""
    return seconds[other] / seconds["multitree"]


def _limits(seconds: dict[str, dict[str, float]], torus: dict[str, TreeSchedule]) -> list[str]:
    star, fat_tree, mesh = (seconds[name] for name in ("star:16", "fattree:16", "mesh:8x8"))
    small = MIB / 16
    halving, tree = (_seconds(torus[plan], small) for plan in ("halving", "multitree"))
    return [
        f"Star: each host has one link, and MultiTree is as fast as a ring "
        f"({_speed(star, 'ring'):.2f}).",
        f"Fat tree: the greedy search needs more steps than a ring "
        f"({_speed(fat_tree, 'ring'):.2f}).",
        f"Mesh: the two links of a corner limit every plan, and MultiTree is as fast as a two-way "
        f"ring ({_speed(mesh, 'two-way-ring'):.2f}).",
        f"Small arrays: 64 KiB on the torus take {tree * 1e3:.2f} ms by MultiTree, and "
        f"{halving * 1e3:.2f} ms by halving, which has fewer steps.",
        "All of this is simulated: equal links, no other traffic, and each step waits for its "
        "busiest link. Plans reduce first and distribute then; pipelined trees that do both at "
        "once can be faster. Clusters use none of these schedules, because LANs are stars.",
    ]  # fmt: skip


EXPERIMENT = Experiment(
    "topologies",
    "Trees for other topologies",
    "MultiTree (ISCA 2021): 2.3× over ring allreduce, 1.56× over the state of the art",
    measured,
)
