"""`hoplite-mp top`: the activity of a running cluster, updated periodically.

Nodes count from their start; a rate is the difference between a counter's values in two polls,
divided by the time between the polls. Nodes that do not answer are shown without numbers. The
command needs rich (extra `top`). If stdout is not a terminal, it prints plain tables.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from hoplite_mp import errors
from hoplite_mp._api.nodes import (
    Node,
    counters,
    list_nodes,
    node_id,
    resource_words,
    with_counts,
)
from hoplite_mp._cli.dump import collect, connect, own_node
from hoplite_mp._cli.status import (
    ACTOR_COLUMNS,
    actor_rows,
    gone,
    gone_line,
    task_counts,
)
from hoplite_mp._cli.table import table
from hoplite_mp._common import clock
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp.errors import ClosedError, HopliteError, ManagerLostError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from hoplite_mp._api.cluster import Cluster

__all__ = ["TopSnapshot", "lines", "top"]

PIPED_COLUMNS = 200  # width of a table if stdout is not a terminal
NARROW_COLUMNS = 150  # terminals narrower than this do not show the columns in LEAST
COLUMNS = (
    "node", "host", "address", "workers", "memory", "queued", "running", "tasks/s", "done",
    "failed", "objects", "sent/s", "received/s",
)  # fmt: skip
NUMBERS = COLUMNS[3:]
LEAST = {"address", "done", "failed", "objects"}
RATES = ("tasks_done", "bytes_sent", "bytes_received")
NO_RATE = "-"  # shown after the first poll of a node
NO_ANSWER, ALL = "no answer", "all"
QUIT_KEYS = b"qQ\x03\x04"  # also Ctrl-C and Ctrl-D, if the terminal passes them as bytes
KEYS_BYTES = 64
INTERRUPTED = 130  # the exit code that shells use


@dataclass(frozen=True, slots=True)
class TopSnapshot:
    """The state at one time: the nodes, and the counters of nodes that have answered."""

    at: float  # seconds of the monotonic clock
    nodes: tuple[Node, ...]
    counts: dict[str, dict[str, int]]  # by node id
    actors: tuple[tuple[str, ...], ...] = ()  # rows of _cli/status.py
    # The numbers of queued and running tasks, by node id.
    tasks: dict[str, dict[str, int]] | None = None
    gone: tuple[str, ...] = ()  # a line for each host that has left or was lost


def lines(now: TopSnapshot, before: TopSnapshot | None) -> list[tuple[str, ...]]:
    """A row for each node, and a row with the totals if there are several nodes. The fields are as
    in COLUMNS."""
    found = []
    names = ("workers", "used", "limit", "done", "failed", "objects", "queued", "running")
    total = dict.fromkeys(names, 0)
    sums: dict[str, float] = {}
    for node in now.nodes:
        free = "".join(f", {text} free" for text in resource_words(node))
        head = (node.id, node.host, node.address, f"{node.workers}{free}")
        counts = now.counts.get(node.id)
        total["workers"] += node.workers
        if counts is None:
            found.append((*head, NO_ANSWER, *[""] * (len(COLUMNS) - len(head) - 1)))
            continue
        rates = _rates(now, before, node.id)
        for name, rate in rates.items():
            sums[name] = sums.get(name, 0.0) + rate
        values = {
            "used": counts["bytes_used"],
            "limit": node.memory_total,
            "done": counts["tasks_done"],
            "failed": counts["tasks_failed"],
            "objects": counts["objects"],
        }
        if now.tasks is not None:
            values |= now.tasks.get(node.id, {})
        for name, number in values.items():
            total[name] += number
        found.append((*head, *_cells(values, rates)))
    if len(found) > 1:
        found.append((ALL, "", "", str(total["workers"]), *_cells(total, sums)))
    return found


def _cells(counts: dict[str, int], rates: dict[str, float]) -> tuple[str, ...]:
    def moved(name: str) -> str:
        return f"{format_bytes(int(rates[name]))}/s" if name in rates else NO_RATE

    return (
        f"{counts['used'] / max(1, counts['limit']):.0%} of {format_bytes(counts['limit'])}",
        str(counts.get("queued", "")),
        str(counts.get("running", "")),
        f"{rates['tasks_done']:.0f}" if "tasks_done" in rates else NO_RATE,
        str(counts["done"]),
        str(counts["failed"]),
        str(counts["objects"]),
        moved("bytes_sent"),
        moved("bytes_received"),
    )


def _rates(now: TopSnapshot, before: TopSnapshot | None, node: str) -> dict[str, float]:
    """The rates per second since the previous poll. Empty if there was no previous poll of this
    node, or if the node has restarted its counters."""
    if before is None or node not in before.counts or now.at <= before.at:
        return {}
    new, old, seconds = now.counts[node], before.counts[node], now.at - before.at
    if any(new[name] < old[name] for name in RATES):
        return {}
    return {name: (new[name] - old[name]) / seconds for name in RATES}


def _poll(cluster: Cluster) -> TopSnapshot:
    """Queries all nodes for their counters, then for their waits; each query has a timeout of a few
    seconds. Excludes a node that this process has started for the command."""
    runtime = cluster._runtime
    counted = {node_id(number): counts for number, counts in counters(runtime).items()}
    at = clock.monotonic()
    own = own_node(cluster)
    shown = (
        with_counts(node, counted[node.id]) if node.id in counted else node
        for node in list_nodes(runtime)
        if own is None or node.id != node_id(own)
    )
    reports = collect(cluster)
    return TopSnapshot(
        at,
        tuple(shown),
        counted,
        tuple(actor_rows(reports)),
        task_counts(reports),
        tuple(map(gone_line, gone(cluster))),
    )


def _drawn(title: str, now: TopSnapshot, before: TopSnapshot | None, width: int) -> Group:
    """The table of nodes, the hosts that are gone, and the table of actors."""
    shown = [name not in LEAST or width >= NARROW_COLUMNS for name in COLUMNS]
    rows = [tuple(compress(row, shown)) for row in (COLUMNS, *lines(now, before))]
    texts = [(title, "italic")]
    for row, line in zip(rows, table(rows, _numbers(rows[0], NUMBERS)), strict=True):
        style = "red" if NO_ANSWER in row else "bold" if row[0] in (ALL, COLUMNS[0]) else ""
        texts.append((line, style))
    texts += [(line, "") for line in now.gone]
    if now.actors:
        numbers = _numbers(ACTOR_COLUMNS, ("waiting", "running", "done"))
        head, *rest = table([ACTOR_COLUMNS, *now.actors], numbers)
        texts += [("", ""), (head, "bold"), *((line, "") for line in rest)]
    # As Text, so that host names are not parsed as markup.
    return Group(*(Text(*line, no_wrap=True, overflow="ellipsis") for line in texts))


def _numbers(columns: Sequence[str], names: Sequence[str]) -> list[int]:
    return [at for at, name in enumerate(columns) if name in names]


class _EndRequest:
    """Waits for the signals and keys that stop the command; they interrupt `sleep`."""

    def __init__(self) -> None:
        self.requested = False
        self._keys = -1  # the terminal's descriptor, if keys are read
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    @contextlib.contextmanager
    def watch(self, keys: bool) -> Iterator[None]:
        """A context manager inside which signals set `requested`. `keys`: whether keys are read,
        for which the terminal is set to unbuffered input."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, self._signalled) for number in numbers}
        woken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        saved: list[Any] | None = None
        try:
            if keys:
                self._keys = sys.stdin.fileno()
                saved = termios.tcgetattr(self._keys)
                tty.setcbreak(self._keys)
            yield
        finally:
            if saved is not None:
                with contextlib.suppress(termios.error):  # the terminal may be gone
                    termios.tcsetattr(self._keys, termios.TCSADRAIN, saved)
            signal.set_wakeup_fd(woken)
            for number, handler in old.items():
                signal.signal(number, handler)
            for fd in (self._read, self._write):
                os.close(fd)

    def _signalled(self, *_: object) -> None:
        if self.requested:  # this is the second signal: the command may be waiting for a node
            raise KeyboardInterrupt
        self.requested = True

    def sleep(self, seconds: float) -> None:
        """Sleeps for the given time, or until the command must stop."""
        end = clock.monotonic() + seconds
        while not self.requested and (left := end - clock.monotonic()) > 0:
            watched = [self._read, *([self._keys] if self._keys >= 0 else [])]
            ready, _, _ = select.select(watched, [], [], left)
            if self._read in ready:
                os.read(self._read, KEYS_BYTES)
            if self._keys in ready:
                self._take_keys()

    def _take_keys(self) -> None:
        try:
            pressed = os.read(self._keys, KEYS_BYTES)
        except OSError:
            pressed = b""
        # No bytes mean the end of the input, because the terminal is gone.
        self.requested = self.requested or not pressed or any(key in QUIT_KEYS for key in pressed)


def top(arguments: argparse.Namespace) -> int:
    """Shows the cluster until the user quits, --count tables have been shown, or the cluster shuts
    down. Returns the exit code."""
    console = Console()
    live = console.is_terminal
    if not live:
        console = Console(width=PIPED_COLUMNS)
    connecting = True
    try:
        cluster = connect(arguments)
        connecting = False
        ending = _EndRequest()
        with cluster, ending.watch(keys=live and sys.stdin.isatty()):
            tables = _tables(cluster, arguments, ending, console)
            (_draw if live else _print)(tables, console)
    except (errors.NodeLostError, ManagerLostError, ClosedError) as error:
        ended = f"the cluster at {arguments.address} has ended"
        print(f"hoplite-mp top: {error if connecting else ended}", file=sys.stderr)
        return 1
    except (HopliteError, ValueError) as error:
        print(f"hoplite-mp top: {error}", file=sys.stderr)
        return 1
    except OSError:  # the terminal, or the reader of the output, is gone
        return 1
    except KeyboardInterrupt:  # a signal while connecting, or a second signal
        return INTERRUPTED
    return 0


def _tables(
    cluster: Cluster, arguments: argparse.Namespace, ending: _EndRequest, console: Console
) -> Iterator[Group]:
    """Yields a table for each interval. On a terminal the first table, which has no rates, appears
    immediately."""
    before: TopSnapshot | None = None
    left = arguments.count
    while not ending.requested and left != 0:
        now = _poll(cluster)
        if before is not None or console.is_terminal:
            title = f"{arguments.address}  {time.strftime('%H:%M:%S')}"
            yield _drawn(title, now, before, console.width)
            left = None if left is None else left - 1
        before = now
        if left != 0:
            ending.sleep(max(0.0, now.at + arguments.interval - clock.monotonic()))


def _draw(tables: Iterator[Group], console: Console) -> None:
    with Live(console=console, screen=True, auto_refresh=False) as screen:
        for picture in tables:
            screen.update(Group(picture, Text("q quits", style="italic")), refresh=True)


def _print(tables: Iterator[Group], console: Console) -> None:
    for picture in tables:
        console.print(picture)
        sys.stdout.flush()
