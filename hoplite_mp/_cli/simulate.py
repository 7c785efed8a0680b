"""The command `hoplite-mp simulate`: operations on many virtual hosts, and runs with faults."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING

from hoplite_mp._cli.table import table
from hoplite_mp._common.machine_limits import format_seconds
from hoplite_mp._simulation.interconnects.interconnect import interconnect
from hoplite_mp._simulation.interconnects.tree_schedules import PLANS, schedule_of
from hoplite_mp._simulation.scale.scale import OPERATIONS, Size, coarseness, measure
from hoplite_mp._version import __version__
from hoplite_mp.config import parse_size
from hoplite_mp.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from hoplite_mp._simulation.interconnects.interconnect import Interconnect
    from hoplite_mp._simulation.runs import RunOutcome
    from hoplite_mp._simulation.scale.scale import ScaleRow

__all__ = ["DEFAULT_NODES", "bandwidth", "duration", "host_counts", "simulate"]

DEFAULT_NODES = "8"
DEFAULT_OPERATIONS = "broadcast,get,reduce,allreduce,reduce_scatter"
DEFAULT_BYTES, DEFAULT_RATE, DEFAULT_LATENCY = "64MiB", "1Gbit", "100us"
# Limited by memory: the streams of a plan take some hundred megabytes per thousand nodes.
SCALE_NODES_MAX = 20_000
NODES_MIN = 2
FAULTS_NODES_MAX = 32  # runs with faults use real nodes
BYTES_LEAST = 64
INTERRUPTED = 130  # the exit code that shells use

_RATE = re.compile(r"([0-9.]+) ?([kKMG]?)bit(?:/s)?")
_SECONDS = re.compile(r"([0-9.eE+-]+) ?(us|µs|ms|s)?")


def simulate(arguments: argparse.Namespace) -> int:
    """Runs the simulation, and prints the result. Returns the exit code."""
    try:
        if arguments.topology is not None:
            return _topologies(arguments)
        if arguments.plan is not None:
            raise ConfigError("--plan requires --topology")
        if arguments.faults == "random":
            return _faults(arguments)
        return _scale(arguments)
    except KeyboardInterrupt:
        print("hoplite-mp simulate: interrupted", file=sys.stderr)
        return INTERRUPTED
    except (ConfigError, OSError) as error:
        print(f"hoplite-mp simulate: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


# ---- many seeds with faults


def _faults(arguments: argparse.Namespace) -> int:
    """Runs real nodes under faults, with the same checks as the tests."""
    # Imported here, because this module imports the whole node.
    from hoplite_mp._simulation.runs import run_seed

    for name in ("operations", "bytes", "rate", "latency", "block", "json"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is not allowed with --faults random, which chooses it")
    nodes = None
    if arguments.nodes is not None:
        (nodes, *more) = host_counts("nodes", arguments.nodes, NODES_MIN, FAULTS_NODES_MAX)
        if more:
            raise ConfigError("--faults random allows only one number in --nodes")
    outcomes: list[RunOutcome] = []
    failed = 0
    for seed in range(arguments.seed, arguments.seed + arguments.seeds):
        outcome = run_seed(seed, nodes=nodes)
        outcomes.append(dataclasses.replace(outcome, tail=()))
        if outcome.failure:
            failed += 1
            for line in outcome.tail if failed == 1 else ():
                print(line, file=sys.stderr)
            options = f"--seed {seed}" + (f" --nodes {nodes}" if nodes else "")
            print(f"FAILED  {options}: {outcome.failure}")
    print(_summary(outcomes))
    return 1 if failed else 0


def _summary(outcomes: Sequence[RunOutcome]) -> str:
    faults = Counter(kind for outcome in outcomes for kind in outcome.faults)
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    if len(outcomes) == 1:
        (outcome,) = outcomes
        counted += f"\ndigest of the log: {outcome.digest}"
    return (
        f"{len(outcomes)} runs of {min(outcome.nodes for outcome in outcomes)} to "
        f"{max(outcome.nodes for outcome in outcomes)} nodes, "
        f"{sum(bool(outcome.failure) for outcome in outcomes)} failed\n"
        f"{sum(outcome.programs for outcome in outcomes)} programs; "
        f"{sum(outcome.errors for outcome in outcomes)} errors explained by a fault; "
        f"{sum(outcome.reads for outcome in outcomes)} values compared byte by byte\n"
        f"{sum(faults.values())} faults: {counted or 'none'}"
    )


# ---- operations one after the other, without faults


def _scale(arguments: argparse.Namespace) -> int:
    operations = _operations(arguments.operations or DEFAULT_OPERATIONS)
    nbytes = _bytes("bytes", arguments.bytes or DEFAULT_BYTES, BYTES_LEAST) // 4 * 4
    rate = bandwidth("rate", arguments.rate or DEFAULT_RATE)
    latency_s = duration("latency", arguments.latency or DEFAULT_LATENCY)
    sizes = []
    for nodes in host_counts("nodes", arguments.nodes or DEFAULT_NODES, NODES_MIN, SCALE_NODES_MAX):
        least = coarseness(nodes)
        if arguments.block is not None:
            least = _bytes("block", arguments.block, 1)
        sizes.append(Size(nodes, nbytes, rate, latency_s, least))
    if arguments.seeds != 1:
        raise ConfigError("--seeds requires --faults random: otherwise the seed has no effect")
    if arguments.json is not None:
        arguments.json.touch()  # fails before the simulation if the file cannot be written
    rows: list[ScaleRow] = []
    try:
        for operation in operations:
            for size in sizes:
                rows.append(measure(operation, size))
                print(f"simulated: {operation} on {size.nodes} nodes", file=sys.stderr)
    finally:  # shows the complete rows even after Ctrl-C
        if rows:
            print(
                f"{arguments.bytes or DEFAULT_BYTES} a source, {arguments.rate or DEFAULT_RATE}/s "
                f"each way, {arguments.latency or DEFAULT_LATENCY} between any two hosts"
            )
            print(show(rows))
        if rows and arguments.json is not None:
            content = {
                "hoplite_mp": __version__,
                "rate": rate,
                "latency_s": latency_s,
                "rows": [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows],
            }
            arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


HEAD = (
    "operation", "nodes", "time", "bound", "times", "messages", "plans", "planner", "longest",
    "stripe plan",
)  # fmt: skip
UNDER = ("", "", "", "", "bound", "a node", "a node", "a message", "message", "")


def show(rows: Sequence[ScaleRow]) -> str:
    """The rows as a table."""
    cells: list[tuple[str, ...]] = [HEAD, UNDER]
    for row in rows:
        cells.append(
            (
                row.operation,
                str(row.nodes),
                format_seconds(row.seconds),
                format_seconds(row.bound_s),
                f"{row.ratio:.2f}",
                f"{row.messages_a_node:.1f}",
                _size(row.bytes_a_node),
                format_seconds(row.step_s),
                format_seconds(row.step_s_max),
                row.stripe_plan,
            )
        )
    return "\n".join(table(cells, right=range(1, 9)))


def _size(nbytes: float) -> str:
    return f"{nbytes:.0f} B" if nbytes < 1000 else f"{nbytes / 1000:.3g} kB"


# ---- an allreduce on other topologies


@dataclasses.dataclass(frozen=True)
class TopologyRow:
    """The time that an allreduce takes with one plan, and its speed relative to the two ring
    plans."""

    topology: str
    plan: str
    trees: int
    blocks: int
    steps: int
    seconds: float
    over_ring: float
    over_two_way_ring: float


def _topologies(arguments: argparse.Namespace) -> int:
    for name in ("nodes", "operations", "block"):
        if getattr(arguments, name) is not None:
            raise ConfigError(f"--{name} is not allowed with --topology")
    if arguments.faults != "none" or arguments.seeds != 1:
        raise ConfigError("--faults and --seeds are not allowed with --topology")
    plans = _plans(arguments.plan or ",".join(PLANS))
    networks = _interconnects(arguments.topology)
    nbytes = _bytes("bytes", arguments.bytes or DEFAULT_BYTES, BYTES_LEAST)
    rate = bandwidth("rate", arguments.rate or DEFAULT_RATE)
    latency_s = duration("latency", arguments.latency or DEFAULT_LATENCY)
    try:
        rows = [
            row
            for network in networks
            for row in topology_rows(network, plans, nbytes, rate, latency_s)
        ]
    except ValueError as error:
        raise ConfigError(f"--plan: {error}") from None
    if arguments.json is not None:
        content = {
            "hoplite_mp": __version__,
            "nbytes": nbytes,
            "rate": rate,
            "latency_s": latency_s,
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(
        f"allreduce of {arguments.bytes or DEFAULT_BYTES}, links of "
        f"{arguments.rate or DEFAULT_RATE}/s each way, "
        f"{arguments.latency or DEFAULT_LATENCY} for each step"
    )
    print(show_topologies(rows))
    return 0


def topology_rows(
    network: Interconnect, plans: Sequence[str], nbytes: int, rate: float, latency_s: float
) -> list[TopologyRow]:
    """A row for each plan on one interconnect."""
    seconds: dict[str, float] = {}
    schedules = {}
    for plan in dict.fromkeys(("ring", "two-way-ring", *plans)):
        schedule = schedule_of(plan, network).with_best_blocks(nbytes, rate, latency_s)
        schedules[plan] = schedule
        seconds[plan] = schedule.seconds(nbytes, rate, latency_s)
    return [
        TopologyRow(
            topology=network.name,
            plan=plan,
            trees=len(schedules[plan].trees),
            blocks=schedules[plan].blocks,
            steps=schedules[plan].steps,
            seconds=seconds[plan],
            over_ring=seconds["ring"] / seconds[plan],
            over_two_way_ring=seconds["two-way-ring"] / seconds[plan],
        )
        for plan in plans
    ]


def show_topologies(rows: Sequence[TopologyRow]) -> str:
    """The rows as a table."""
    cells: list[tuple[str, ...]] = [
        ("topology", "plan", "trees", "blocks", "steps", "time", "speed ÷", "speed ÷"),
        ("", "", "", "a tree", "", "", "ring", "two-way ring"),
    ]
    cells += [
        (
            row.topology,
            row.plan,
            str(row.trees),
            str(row.blocks),
            str(row.steps),
            format_seconds(row.seconds),
            f"{row.over_ring:.2f}",
            f"{row.over_two_way_ring:.2f}",
        )
        for row in rows
    ]
    return "\n".join(table(cells, right=range(2, 8)))


# ---- options


def _plans(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in PLANS:
            raise ConfigError(
                f"--plan={text!r} is not allowed: {word!r} is not one of {', '.join(PLANS)}"
            )
    return found


def _interconnects(text: str) -> list[Interconnect]:
    try:
        return [interconnect(word.strip()) for word in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"--topology: {error}") from None


def host_counts(option: str, text: str, least: int, most: int) -> list[int]:
    """Parses an option with a list of numbers of hosts."""
    found = []
    for word in text.split(","):
        if not word.strip().isdecimal() or not least <= int(word) <= most:
            raise ConfigError(
                f"--{option}={text!r} is not allowed: use whole numbers from {least} to {most}, "
                "separated by commas"
            )
        found.append(int(word))
    return found


def _operations(text: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    for word in found:
        if word not in OPERATIONS:
            raise ConfigError(
                f"--operations={text!r} is not allowed: {word!r} is not one of "
                f"{', '.join(OPERATIONS)}"
            )
    return found


def _bytes(name: str, text: str, least: int) -> int:
    try:
        nbytes = parse_size(text)
    except ConfigError as error:
        raise ConfigError(f"--{name}: {error}") from None
    if nbytes < least:
        raise ConfigError(f"--{name}={text!r} is not allowed: use at least {least} bytes")
    return nbytes


def bandwidth(option: str, text: str) -> float:
    """Parses an option with a rate, and returns bytes per second."""
    match = _RATE.fullmatch(text.strip())
    rate = math.nan
    if match is not None:
        number, unit = match.groups()
        rate = _number(number) * 1000 ** " KMG".index(unit.upper() or " ") / 8
    if not 1 <= rate < math.inf:
        raise ConfigError(
            f"--{option}={text!r} is not allowed: use bits per second with a unit, such as "
            '"100Mbit" or "10Gbit"'
        )
    return rate


def duration(option: str, text: str) -> float:
    """Parses an option with a time, and returns seconds."""
    match = _SECONDS.fullmatch(text.strip())
    seconds = math.nan
    if match is not None:
        number, unit = match.groups()
        seconds = _number(number) * {"us": 1e-6, "µs": 1e-6, "ms": 1e-3}.get(unit, 1.0)
    if not 0 <= seconds <= 60:
        raise ConfigError(
            f"--{option}={text!r} is not allowed: use a time up to a minute, such as "
            '"100us", "1ms" or "0.05s"'
        )
    return seconds


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
