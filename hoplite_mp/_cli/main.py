"""The command `hoplite-mp`."""

from __future__ import annotations

import argparse
import contextlib
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
"""Modules of the extra `demo`, and the packages that bring them."""
# Limits of `top --interval`. With a shorter one `top` would mostly show its own load; a longer one
# is a task for cron.
INTERVAL_S_MIN, INTERVAL_S_MAX = 0.1, 3600.0
TOP_NEEDS = {"rich": "rich"}
"""The same for the extra `top`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    try:
        with _warnings_printed():
            code = _run(argv)
    except BrokenPipeError:  # the reader of the output has gone
        code = 1
    finally:
        written = _flushed(sys.stdout) & _flushed(sys.stderr)
    return code or int(not written)


@contextlib.contextmanager
def _warnings_printed() -> Iterator[None]:
    """Inside this context, stderr receives warnings of this package like a command's own lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("hoplite-mp: %(message)s"))
    logger = logging.getLogger("hoplite_mp")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _flushed(stream: TextIO) -> bool:
    """Flushes, and returns whether everything is written. If not, the stream leads to /dev/null
    from then on: otherwise the interpreter would flush again as it ends, print a complaint of its
    own, and exit with code 120."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return False
    return True


def _run(argv: Sequence[str] | None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.command == "demo":
        return _demo(arguments)
    if arguments.command in ("up", "join"):
        from hoplite_mp._cli.up_join import join, up

        return (up if arguments.command == "up" else join)(arguments)
    if arguments.command == "status":
        from hoplite_mp._cli.status import status

        return status(arguments)
    if arguments.command == "doctor":
        from hoplite_mp._cli.doctor.main import doctor

        return doctor(arguments)
    if arguments.command == "bench":
        from hoplite_mp._cli.bench.main import bench

        return bench(arguments)
    if arguments.command == "simulate":
        from hoplite_mp._cli.simulate import simulate

        return simulate(arguments)
    if arguments.command == "promote":
        from hoplite_mp._cli.promote import promote

        return promote(arguments)
    if arguments.command == "top":
        return _top(arguments)
    if arguments.command == "dump":
        from hoplite_mp._cli.dump import dump

        return dump(arguments)
    parser().print_help()
    return 0


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="hoplite-mp", description="Parallel Python with objects in shared memory."
    )
    top.add_argument("--version", action="version", version=f"hoplite-mp {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command")
    _add_demo(commands)
    _add_simulate(commands)
    members = _add_members(commands)
    _, join = members
    for command in members:
        command.add_argument(
            "--workers", type=_workers, metavar="N", help="default: the CPUs of this host"
        )
        command.add_argument("--memory", metavar="SIZE", help='limit of the store, as "2GiB"')
        command.add_argument("--ports", metavar="A-B", help="where this node listens for others")
        command.add_argument(
            "--resources",
            type=_resources,
            metavar="NAME=AMOUNT",
            help='what this host has for tasks with options(resources=), as "gpu=2" or '
            '"gpu=2,disk=0.5"',
        )
    for command in (*members, *_add_lookers(commands), *_add_checks(commands)):
        command.add_argument(
            "--token-file",
            type=Path,
            metavar="F",
            help="the cluster's secret"
            + ("; - reads it from standard input, whose end ends the node" * (command is join)),
        )
        command.add_argument("--no-tls", action="store_true", help="send everything in the clear")
    return top


def _add_demo(commands: Commands) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a network on this host while a worker is killed, beside ProcessPoolExecutor",
        description="Asynchronous data-parallel training with a parameter server on scikit-learn's "
        "handwritten digits. Each step takes the first two gradients to be ready; half way one "
        "worker is killed. The same training runs on concurrent.futures.ProcessPoolExecutor. "
        "Exit code 1 if our test accuracy is below 95 %.",
    )
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
    demo.add_argument("--no-kill", action="store_true", help="let all workers live")
    demo.add_argument(
        "--out", type=Path, metavar="DIR", help="write result.json and accuracy.png there"
    )


def _add_simulate(commands: Commands) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="the real planner on a simulated network",
        description="Plays operations on hosts that are not there, in virtual time: the planner "
        "and the programs are the real ones. Without faults: how long each takes, beside what no "
        "plan could beat, and what it costs the manager. With --faults random: clusters, work and "
        "faults drawn from seeds, every block judged; exit code 1 if anything does not hold. A "
        "seed replays a run exactly.",
    )
    simulate.add_argument(
        "--nodes", metavar="N", help='default: 8; several as "8,64,1000"; with faults: drawn'
    )
    simulate.add_argument(
        "--seed", type=_count, default=0, metavar="S", help="the first one; default: %(default)s"
    )
    simulate.add_argument(
        "--seeds", type=_positive, default=1, metavar="COUNT", help="with faults: so many runs"
    )
    simulate.add_argument("--faults", choices=("none", "random"), default="none")
    simulate.add_argument(
        "--operations",
        metavar="NAMES",
        help="of broadcast, get, reduce, allreduce, reduce_scatter, gather, allgather, with commas "
        "between; default: the first five",
    )
    simulate.add_argument("--bytes", metavar="SIZE", help="of each source; default: 64MiB")
    simulate.add_argument(
        "--rate", metavar="RATE", help="of each host's link, each way; default: 1Gbit"
    )
    simulate.add_argument("--latency", metavar="TIME", help="one way; default: 100us")
    simulate.add_argument(
        "--block",
        metavar="SIZE",
        help="move at least so much at a time: coarser, and faster; default: as the engine does, "
        "64KiB for more than 128 nodes",
    )
    simulate.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")


def _add_members(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands that make this host take part in a cluster."""
    up = commands.add_parser(
        "up",
        help="start a cluster here that other hosts can join",
        description="Manager and node on this host, in the foreground. Prints the command for the "
        "other hosts to stdout when it is ready, and what to do with it to stderr. It works for "
        "the cluster meanwhile. SIGTERM or Ctrl-C ends the cluster.",
    )
    up.add_argument("--listen", required=True, metavar="HOST:PORT", help="where others join")
    up.add_argument(
        "--standby",
        action=_Once,
        metavar="HOST:PORT",
        help="where the manager is to be if this host is lost: an address of a host that joins. It "
        "takes over by itself if more than half of all hosts are left, else see `promote`",
    )
    join = commands.add_parser(
        "join",
        help="let this host take part in a cluster",
        description="A node on this host joins. Ends with exit code 0 when the cluster ends, with "
        "1 and one line when it cannot join.",
    )
    join.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="as `hoplite-mp up` printed it; without it, lists the clusters that this network "
        "announces (extra `lan`), and ends",
    )
    join.add_argument(
        "--wait",
        type=_patience,
        metavar="S",
        help="try for so long, and wait for a token file that is missing, too, which is else an "
        "error at once; default: 30",
    )
    return [up, join]


def _add_lookers(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands for a cluster that is running."""
    status = commands.add_parser(
        "status",
        help="what a running cluster looks like",
        description="Nodes, their workers and memory, tasks, objects and bytes moved, once. Ends "
        "with 1 and one line when the cluster cannot be reached.",
    )
    status.add_argument("address", metavar="HOST:PORT", help="as `hoplite-mp up` printed it")
    status.add_argument("--json", action="store_true", help="print the same as JSON, for programs")
    watch = commands.add_parser(
        "top",
        help="what a running cluster does, redrawn each second",
        description="Nodes, their workers and memory, tasks, objects and bytes per second. q or "
        "Ctrl-C ends it. Where the output is no terminal, one table each interval.",
    )
    watch.add_argument("address", metavar="HOST:PORT", help="as `hoplite-mp up` printed it")
    watch.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="S", help="default: %(default)g s"
    )
    watch.add_argument("--count", type=_positive, metavar="N", help="end after so many tables")
    dump = commands.add_parser(
        "dump",
        help="what everybody in a running cluster waits for",
        description="Every wait and who owns it, by node: tasks, objects on their way, "
        "collectives, Groups, blocked processes. For a cluster that seems to hang; it changes "
        "nothing there. Ends with 1 and one line when the cluster cannot be reached.",
    )
    dump.add_argument("address", metavar="HOST:PORT", help="as `hoplite-mp up` printed it")
    dump.add_argument("--json", action="store_true", help="everything, for programs")
    dump.add_argument(
        "--stacks", action="store_true", help="also where the threads of the workers stand"
    )
    return [status, watch, dump, _add_promote(commands)]


def _add_promote(commands: Commands) -> argparse.ArgumentParser:
    promote = commands.add_parser(
        "promote",
        help="make a standby the manager",
        description="Where a standby cannot take over by itself, since of two hosts only its own "
        "is left: says that the manager's host is gone for good. A manager that is only cut off "
        "goes on deciding until it hears of this, so be sure. Exit code 0 when the standby leads.",
    )
    promote.add_argument("address", metavar="HOST:PORT", help="of the standby, as of up --standby")
    promote.add_argument(
        "--anyway", action="store_true", help="although most of more than two hosts are not there"
    )
    return promote


def _add_checks(commands: Commands) -> list[argparse.ArgumentParser]:
    """Adds the commands that test a host, or the hosts of a cluster."""
    doctor = commands.add_parser(
        "doctor",
        help="what is wrong with this host",
        description="Checks this host: software, kernel, CPUs, limits, memory, disk, addresses, "
        "token; then starts two workers and uses them. With HOST:PORT also the way to that cluster "
        "and to each of its nodes. Exit code 1 if anything is a problem.",
    )
    doctor.add_argument("address", nargs="?", metavar="HOST:PORT", help="a running cluster")
    doctor.add_argument(
        "--no-start", action="store_true", help="start no processes and join nothing"
    )
    bench = commands.add_parser(
        "bench",
        help="measure this host, or the hosts of a cluster",
        description="Small tasks, large objects, arguments and a reduction on this host, beside "
        "ProcessPoolExecutor, memcpy and numpy, in about 20 s. With HOST:PORT: tasks at each node "
        "of that cluster, bytes to it, and an allreduce over all.",
    )
    bench.add_argument("address", nargs="?", metavar="HOST:PORT", help="a running cluster")
    bench.add_argument("--quick", action="store_true", help="in about 5 s, with fewer rounds")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    bench.add_argument(
        "--workers", type=_positive, metavar="N", help="on this host; default: its CPUs, 2 to 16"
    )
    return [doctor, bench]


class _Once(argparse.Action):
    """An option that may be given once; by default argparse would silently use the last one."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error(f"{option_string} was given twice: there is one at most")
        setattr(namespace, self.dest, values)


def _count(text: str) -> int:
    return _whole(text, "of 0 or more", lambda number: number >= 0)


def _workers(text: str) -> int:
    from hoplite_mp._client.demands import WORKERS_MAX

    most = WORKERS_MAX
    return _whole(text, f"from 0 to {most}", lambda number: 0 <= number <= most)


def _whole(text: str, which: str, is_one: Callable[[int], bool]) -> int:
    try:
        number = int(text)
    except ValueError:
        number = None
    if number is None or not is_one(number):
        raise argparse.ArgumentTypeError(f"must be a whole number {which}, not {text!r}")
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
            f"must be seconds from {INTERVAL_S_MIN:g} to {INTERVAL_S_MAX:g}, not {text!r}"
        )
    return number


def _patience(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds from 0, not {text!r}")
    return number


def _positive(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return int(text)


def _lacking(command: str, needs: dict[str, str]) -> bool:
    """Is the command's extra missing? If so, prints how to install it."""
    missing = [package for name, package in needs.items() if not _importable(name)]
    if missing:
        print(
            f"hoplite-mp {command} needs {', '.join(missing)}: pip install 'hoplite-mp[{command}]'",
            file=sys.stderr,
        )
    return bool(missing)


def _top(arguments: argparse.Namespace) -> int:
    if _lacking("top", TOP_NEEDS):
        return 1

    from hoplite_mp._cli.top import top

    return top(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    if _lacking("demo", DEMO_NEEDS):
        return 1

    from hoplite_mp._cli.demo.main import demo

    plan = TrainingPlan(arguments.workers, arguments.steps, kill=not arguments.no_kill)
    return demo(plan, arguments.out)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module in sys.modules without a spec
        return False
