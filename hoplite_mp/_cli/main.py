"""The command `hoplite-mp`: parses its arguments and runs the subcommands."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import logging
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hoplite_mp._cli.demo.training import TrainingPlan
from hoplite_mp._version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import TextIO, TypeAlias

    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

DEMO_NEEDS = {"sklearn": "scikit-learn", "rich": "rich", "matplotlib": "matplotlib"}
"""Modules of the extra `demo`, and the packages that provide them."""
# Limits for `top --interval`. At shorter intervals `top` would mostly show its own load.
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
TOP_NEEDS = {"rich": "rich"}
"""Modules of the extra `top`, and the packages that provide them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        with _warnings_printed():
            code = _run(argv)
    except BrokenPipeError:  # the reader of stdout has exited
        code = 1
    finally:
        written = _flushed(sys.stdout) & _flushed(sys.stderr)
    return code or int(not written)


@contextlib.contextmanager
def _warnings_printed() -> Iterator[None]:
    """Prints this package's log messages to stderr in the same format as the commands' errors."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hoplite-mp: %(message)s"))
    logger = logging.getLogger("hoplite_mp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _flushed(stream: TextIO) -> bool:
    """Flushes the stream; returns whether all output was written. After a failure the stream is
    redirected to /dev/null: otherwise the interpreter would flush again at exit, print an error,
    and exit with code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(null, stream.fileno())
            os.close(null)
        return False
    return True


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.command is None:
        parser().print_help()
        return 0
    run: Callable[[argparse.Namespace], int] = arguments.run
    return run(arguments)


def _lazy(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    """Returns a function that runs a command. Its module is imported at the call."""

    def run(arguments: argparse.Namespace) -> int:
        code: int = getattr(importlib.import_module(module), function)(arguments)
        return code

    return run


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="hoplite-mp", description="Parallel Python with objects in shared memory."
    )
    top.add_argument("--version", action="version", version=f"hoplite-mp {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    _add_demo(commands)
    _add_simulate(commands)
    _add_predict(commands)
    members = _add_members(commands)
    _, join = members
    for command in members:
        command.add_argument(
            "--workers",
            type=_workers,
            metavar="N",
            help="number of workers; default: the CPUs of this host",
        )
        command.add_argument(
            "--memory", metavar="SIZE", help='size limit of the store, for example "2GiB"'
        )
        command.add_argument(
            "--ports", metavar="A-B", help="range of ports for connections from other nodes"
        )
        command.add_argument(
            "--resources",
            type=_resources,
            metavar="NAME=AMOUNT",
            help='resources of this host for options(resources=), for example "gpu=2" or '
            '"gpu=2,disk=0.5"',
        )
    for command in (*members, *_add_monitors(commands), *_add_checks(commands)):
        command.add_argument(
            "--token-file",
            type=Path,
            metavar="F",
            help="file with the cluster's secret"
            + ("; with -, it is read from standard input, and the node stops when that input ends")
            * (command is join),
        )
        command.add_argument("--no-tls", action="store_true", help="do not encrypt connections")
    return top


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a network while a worker is killed, compared with ProcessPoolExecutor",
        description="Asynchronous data-parallel training with a parameter server on scikit-learn's "
        "handwritten digits. Each step uses the first two gradients to become ready; halfway, one "
        "worker is killed. For comparison, the same training runs on ProcessPoolExecutor. "
        "Exit code 1 if the test accuracy is below 95 %.",
    )
    demo.set_defaults(run=_demo)
    demo.add_argument(
        "--workers",
        type=_positive,
        default=TrainingPlan.workers,
        metavar="N",
        help="default: %(default)s",
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        default=TrainingPlan.steps,
        metavar="S",
        help="default: %(default)s",
    )
    demo.add_argument("--no-kill", action="store_true", help="do not kill a worker")
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="directory for result.json and accuracy.png"
    )


def _add_simulate(commands: Commands) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run the planner on a simulated network",
        description="Simulates operations on many hosts in virtual time, with the real planner and "
        "node. Without faults: shows the time of each operation, a lower bound, and the cost for "
        "the manager. With --faults random: runs random clusters, workloads and faults, and checks "
        "every value; exit code 1 if a check fails. The same seed repeats the same run. With "
        "--topology: shows the time of an allreduce on interconnects other than a star, for each "
        "plan in --plan.",
    )
    simulate.set_defaults(run=_lazy("hoplite_mp._cli.simulate", "simulate"))
    simulate.add_argument(
        "--nodes",
        metavar="N",
        help='number of nodes, or several, as in "8,64,1000"; default: 8; with faults: random',
    )
    simulate.add_argument(
        "--seed", type=_count, default=0, metavar="S", help="first seed; default: %(default)s"
    )
    simulate.add_argument(
        "--seeds", type=_positive, default=1, metavar="COUNT", help="number of runs with faults"
    )
    simulate.add_argument("--faults", choices=("none", "random"), default="none")
    simulate.add_argument(
        "--operations",
        metavar="NAMES",
        help="comma-separated list of broadcast, get, reduce, allreduce, reduce_scatter, gather, "
        "allgather; default: the first five",
    )
    simulate.add_argument(
        "--bytes", "--nbytes", metavar="SIZE", help="size of each source; default: 64MiB"
    )
    simulate.add_argument(
        "--topology",
        metavar="NAMES",
        help="comma-separated list of torus:RxC, mesh:RxC, fattree:N, star:N; --rate applies to "
        "all links, and --latency is added to each step",
    )
    simulate.add_argument(
        "--plan",
        metavar="NAMES",
        help="with --topology: comma-separated list of ring, two-way-ring, halving, twotree, "
        "multitree, packed; default: all",
    )
    simulate.add_argument(
        "--rate", metavar="RATE", help="rate of each host's link in each direction; default: 1Gbit"
    )
    simulate.add_argument("--latency", metavar="TIME", help="one-way latency; default: 100us")
    simulate.add_argument(
        "--block",
        metavar="SIZE",
        help="smallest block; larger blocks are faster to simulate and less exact; default: the "
        "engine's smallest block, or 64KiB for more than 128 nodes",
    )
    simulate.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to this file"
    )


def _add_predict(commands: Commands) -> None:
    predict = commands.add_parser(
        "predict",
        help="predict the steps per second of a training program on more hosts",
        description="Replays the steps in a trace of one worker on simulated hosts with the real "
        "node and planner, in virtual time. Shows steps per second, the percentiles of single "
        "steps, and the share of time in which links and cores are busy, the bottleneck first. "
        "In synchronous training, the traced worker calls a Group of size 1. In asynchronous "
        "training, it calls an actor, which then runs alone on the first host.",
    )
    predict.set_defaults(run=_lazy("hoplite_mp._cli.predict", "predict"))
    predict.add_argument(
        "trace", type=Path, metavar="FILE", help="written by Cluster.trace while one worker trained"
    )
    predict.add_argument(
        "--hosts", default="2,4,8", metavar="N", help="comma-separated list; default: %(default)s"
    )
    _add_machines(predict)
    predict.add_argument(
        "--server",
        metavar="NAME",
        help="name or class of the actor that holds the model's parameters; default: the only "
        "actor, if there are no Group calls",
    )
    predict.add_argument(
        "--calls-per-step",
        type=_positive,
        metavar="N",
        help="default: the shortest sequence of calls that repeats",
    )
    predict.add_argument(
        "--steps",
        type=_positive,
        default=20,
        metavar="N",
        help="number of steps for each worker; default: %(default)s",
    )
    predict.add_argument(
        "--seed", type=_count, default=0, metavar="S", help="for the choice of recorded steps"
    )
    predict.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the table to this file"
    )


def _add_machines(predict: argparse.ArgumentParser) -> None:
    """Adds the options that describe the hosts."""
    predict.add_argument(
        "--bandwidth",
        default="1Gbit",
        metavar="RATE",
        help="nominal bandwidth of each link in each direction, with the headers of TCP over "
        "Ethernet; default: %(default)s",
    )
    predict.add_argument(
        "--latency", default="100us", metavar="TIME", help="one-way latency; default: %(default)s"
    )
    predict.add_argument(
        "--cores-per-host",
        type=_cores,
        default=1.0,
        metavar="N",
        help="cores that a worker and the library share on a host; default: %(default)g",
    )
    predict.add_argument(
        "--cores",
        type=_cores,
        metavar="N",
        help="cores that all hosts share, if they are emulated on one machine",
    )
    predict.add_argument(
        "--cpu-per-gb",
        type=_seconds_of_cpu,
        metavar="S",
        help="CPU seconds to send and receive 1 GB; default: measured over loopback",
    )


def _add_members(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands that run a node on this host."""
    up = commands.add_parser(
        "up",
        help="start a cluster here that other hosts can join",
        description="Runs the manager and a node in the foreground. When they are ready, prints "
        "the command for other hosts to stdout, and instructions to stderr. SIGTERM or Ctrl-C "
        "shuts the cluster down.",
    )
    up.set_defaults(run=_lazy("hoplite_mp._cli.up_join", "up"))
    up.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for other hosts")
    up.add_argument(
        "--standby",
        action=_Once,
        metavar="HOST:PORT",
        help="address of a standby, on a host that joins. The standby becomes the manager if this "
        "host is lost and more than half of all hosts are left; otherwise see `promote`",
    )
    join = commands.add_parser(
        "join",
        help="add this host to a cluster",
        description="Runs a node that joins the cluster. Exit code 0 when the cluster shuts down; "
        "1, with one line on stderr, if the node cannot join.",
    )
    join.set_defaults(run=_lazy("hoplite_mp._cli.up_join", "join"))
    join.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="address printed by `hoplite-mp up`; without it, lists the clusters announced on this "
        "network (extra `lan`)",
    )
    join.add_argument(
        "--wait",
        type=_wait_seconds,
        metavar="S",
        help="seconds to keep retrying; default: 30. Also waits for a missing token file, which is "
        "otherwise an immediate error",
    )
    return [up, join]


def _add_monitors(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands for a running cluster."""
    status = commands.add_parser(
        "status",
        help="show the state of a running cluster",
        description="Shows nodes with their workers and memory, tasks, objects and bytes moved. "
        "Exit code 1, with one line on stderr, if the cluster cannot be reached.",
    )
    status.set_defaults(run=_lazy("hoplite_mp._cli.status", "status"))
    status.add_argument("address", metavar="HOST:PORT", help="address printed by `hoplite-mp up`")
    status.add_argument("--json", action="store_true", help="print JSON for programs")
    watch = commands.add_parser(
        "top",
        help="watch a running cluster, updated every second",
        description="Shows nodes with their workers and memory, tasks, objects and bytes per "
        "second. Quit with q or Ctrl-C. If stdout is not a terminal, it prints one table per "
        "interval.",
    )
    watch.set_defaults(run=_top)
    watch.add_argument("address", metavar="HOST:PORT", help="address printed by `hoplite-mp up`")
    watch.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds between updates; default: %(default)g",
    )
    watch.add_argument(
        "--count", type=_positive, metavar="N", help="quit after this number of tables"
    )
    dump = commands.add_parser(
        "dump",
        help="show what the processes of a running cluster are waiting for",
        description="Shows all waits by node: tasks, transfers, collectives, Groups, blocked "
        "processes. Use it if a cluster seems to hang; it does not disturb the cluster. Exit code "
        "1, with one line on stderr, if the cluster cannot be reached.",
    )
    dump.set_defaults(run=_lazy("hoplite_mp._cli.dump", "dump"))
    dump.add_argument("address", metavar="HOST:PORT", help="address printed by `hoplite-mp up`")
    dump.add_argument("--json", action="store_true", help="print everything as JSON for programs")
    dump.add_argument(
        "--stacks", action="store_true", help="also show the stacks of the workers' threads"
    )
    return [status, watch, dump, _add_promote(commands)]


def _add_promote(commands: Commands) -> argparse.ArgumentParser:
    promote = commands.add_parser(
        "promote",
        help="make a standby the manager",
        description="Makes the standby the manager of a cluster of two hosts after it has lost "
        "contact with the manager's host. The standby cannot know whether that host is dead. Make "
        "sure that it is: a manager that is only cut off continues to make decisions until the "
        "standby reaches it. Exit code 0 when the standby is the manager.",
    )
    promote.set_defaults(run=_lazy("hoplite_mp._cli.promote", "promote"))
    promote.add_argument(
        "address", metavar="HOST:PORT", help="address of the standby, as in `up --standby`"
    )
    promote.add_argument(
        "--anyway",
        action="store_true",
        help="promote even in a cluster of more than two hosts, without a majority of them",
    )
    return promote


def _add_checks(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands that test a host, or the hosts of a cluster."""
    doctor = commands.add_parser(
        "doctor",
        help="check this host",
        description="Checks software, kernel, CPUs, limits, memory, disk, addresses and token of "
        "this host; then starts two workers and tests them. With HOST:PORT, also tests the "
        "connections to that cluster and each of its nodes. Exit code 1 if there is a problem.",
    )
    doctor.set_defaults(run=_lazy("hoplite_mp._cli.doctor.main", "doctor"))
    doctor.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="address of a running cluster"
    )
    doctor.add_argument(
        "--no-start", action="store_true", help="do not start processes or join a cluster"
    )
    bench = commands.add_parser(
        "bench",
        help="measure this host, or the hosts of a cluster",
        description="Measures small tasks, large objects, arguments and a reduction on this host, "
        "compared with ProcessPoolExecutor, memcpy and numpy, in about 20 s. With HOST:PORT: "
        "measures tasks on each node of that cluster, transfers to each node, and an allreduce "
        "over all nodes.",
    )
    bench.set_defaults(run=_lazy("hoplite_mp._cli.bench.host", "bench"))
    bench.add_argument(
        "address", nargs="?", metavar="HOST:PORT", help="address of a running cluster"
    )
    bench.add_argument("--quick", action="store_true", help="fewer rounds, in about 5 s")
    bench.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the numbers to this file"
    )
    bench.add_argument(
        "--workers",
        type=_positive,
        metavar="N",
        help="workers on this host; default: one for each CPU, but at least 2 and at most 16",
    )
    return [doctor, bench]


class _Once(argparse.Action):
    """An option that may be given only once; argparse itself would silently use the last value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} may be given only once")
        setattr(namespace, self.dest, values)


def _count(text: str) -> int:
    return _whole(text, "of at least 0", lambda number: number >= 0)


def _workers(text: str) -> int:
    from hoplite_mp._client.demands import WORKERS_MAX

    most = WORKERS_MAX
    return _whole(text, f"from 0 to {most}", lambda number: 0 <= number <= most)


def _whole(text: str, limits: str, is_legal: Callable[[int], bool]) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not is_legal(number):
        raise argparse.ArgumentTypeError(f"must be a whole number {limits}, not {text!r}")
    return number


def _resources(text: str) -> dict[str, float]:
    from hoplite_mp._planner.resources import as_amounts, parse_amounts

    try:
        return as_amounts(parse_amounts(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not INTERVAL_S_MIN <= number <= INTERVAL_S_MAX:
        raise argparse.ArgumentTypeError(
            f"must be a number of seconds from {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g}, "
            f"not {text!r}"
        )
    return number


def _wait_seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, at least 0, not {text!r}")
    return number


def _cores(text: str) -> float:
    try:
        cores = float(text)
    except ValueError:
        cores = math.nan
    if not 0.01 <= cores <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of cores, at least 0.01, not {text!r}")
    return cores


def _seconds_of_cpu(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds, not {text!r}")
    return seconds


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _is_extra_missing(command: str, needs: dict[str, str]) -> bool:
    """Whether packages of the command's extra are missing. If so, prints how to install them."""
    missing = [package for name, package in needs.items() if not _importable(name)]
    if missing:
        print(
            f"hoplite-mp {command} needs {', '.join(missing)}: pip install 'hoplite-mp[{command}]'",
            file=sys.stderr,
        )
    return bool(missing)


def _top(arguments: argparse.Namespace) -> int:
    if _is_extra_missing("top", TOP_NEEDS):
        return 1

    from hoplite_mp._cli.top import top

    return top(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    if _is_extra_missing("demo", DEMO_NEEDS):
        return 1

    from hoplite_mp._cli.demo.main import demo

    plan = TrainingPlan(arguments.workers, arguments.steps, kill=not arguments.no_kill)
    return demo(plan, arguments.out)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False
