"""`python -m benchmarks.lan [-n 4] [--sections ...]`: collectives over emulated hosts.

Needs root. The bound of each row is that of a star of links (Blink, MLSys 2020; formulas in
_planner/cost.py). groups: calls of Groups. cpu: their CPU time, and that of plain sockets. tls: the
same over TLS. refs: collectives on results of tasks. apart: ranks that arrive 0.3 s after each
other. unequal: one link with a quarter of the rate, and equal links with one path of an eighth
between two hosts (packed trees). fast: unlimited links. Each row also has the time of Gloo on the
same hosts, if its environment exists (`make peers`). All results are written to
benchmarks/results/lan-*.json."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import TYPE_CHECKING

from benchmarks.common import MIB, ROOT, Row, beside
from benchmarks.lan.floor import floor_rows
from benchmarks.lan.groups import group_rows
from benchmarks.lan.hosts import bound_s, cluster, link_rate
from benchmarks.lan.refs import ref_rounds, ref_rows
from benchmarks.lan.rounds import APART_S, STREAK
from benchmarks.peers.gloo import Gloo
from benchmarks.report import table as drawn
from tests.lan import UNLIMITED, Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

KINDS = ("broadcast", "reduce", "allreduce", "gather", "allgather", "reduce_scatter")
SECTIONS = ("groups", "cpu", "tls", "apart", "refs", "unequal", "fast")
# Seconds, few and many hosts. A broadcast commits when all ranks have called: a barrier and a part.
SMALL = {"barrier": (0.4e-3, 1.2e-3), "allreduce": (0.5e-3, 1.5e-3), "broadcast": (0.5e-3, 1.3e-3)}
# Ratios to the bound, few and many hosts, of 64 MiB (Groups and refs alike) and of 1 MiB.
LARGE_WANTED = {kind: (1.02, 1.04) if kind == "allreduce" else (1.03, 1.06) for kind in KINDS}
MIB_WANTED = (1.25, 1.6)
# Processor time, few and many hosts, ÷ the floor's and ÷ Gloo's.
FLOOR_WANTED = {"broadcast": (1.1, 1.1), "allgather": (1.1, 1.1)}
GLOO_WANTED = {"allreduce": (1.0, 1.0), "reduce": (1.0, 1.0), "reduce_scatter": (0.7, 0.55)}
# Where both are so near the bound, ours may be by so much slower than Gloo; else it must be faster.
BOTH_NEAR, NEAR_WANTED = 1.05, 1.01
REFS = ("reduce", "reduce_num", "allreduce", "broadcast", "gather")
MANY = 4  # hosts; beyond, the second number of a target counts
LARGE, FAST = 64 * MIB, 256 * MIB
TLS_WANTED = (1.05, 1.15)  # ÷ without
LEARNING = 3  # rounds, but the one that is not counted, until the rate of a path is known
CPU_ROUNDS = 20  # the clock of processor time has ticks of 10 ms


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan", description=__doc__)
    parser.add_argument("-n", type=int, default=4, help="hosts (%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it")
    parser.add_argument("--tls", action="store_true", help="with TLS")
    parser.add_argument("--sections", nargs="*", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS, help="of Group calls")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--stored", action="store_true", help="what Groups are given is in the store"
    )
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    gloo = Gloo()
    table: list[Row] = []
    if {"groups", "cpu", "tls", "apart", "refs"} & set(options.sections):
        with Lan(options.n, options.rate) as lan:
            link = link_rate(lan[0], lan[1])
            print(f"links: {link / 1e6:.1f} MB/s each way, {'TLS' if options.tls else 'no TLS'}")
            if "groups" in options.sections:
                table += _groups(lan, link, options, gloo)
            if "cpu" in options.sections and not options.tls:
                table += _processor(lan, link, options, gloo)
            if "tls" in options.sections and not options.tls:
                table += _tls(lan, link, options, gloo)
            if "apart" in options.sections:
                table += _apart(lan, link, options, gloo)
            if "refs" in options.sections:
                table += _refs(lan, link, options, gloo)
    if "unequal" in options.sections and options.n == MANY:
        table += _unequal(options, gloo)
        table += _narrow(options, gloo)
    if "fast" in options.sections:
        table += _fast(options, gloo)
    print(drawn([row.as_dict() for row in table]))
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    name = f"lan-{options.n}{'-tls' if options.tls else ''}.json"
    (results / name).write_text(json.dumps([row.as_dict() for row in table], indent=1))
    return 0


def _limit(options: argparse.Namespace, wanted: tuple[float, float] | None) -> float | None:
    return None if wanted is None else wanted[options.n > MANY]


def _against(title: str, seconds: float, bound: float, wanted: float | None) -> Row:
    return Row(title, seconds, "s", "bound", bound, ratio=seconds / bound, wanted=wanted)


def _beside(row: Row, key: str, others: Mapping[str, float | None]) -> Iterator[Row]:
    """The row, and what Gloo found for the same, if there is anything."""
    yield row
    if key in others:
        gloo = others[key]
        other = beside(row.title, row.ours, row.unit, Gloo.name, gloo)
        if gloo is not None and row.unit == "s":
            near = BOTH_NEAR * (row.reference_value or 0.0)
            both_near = max(row.ours, gloo) <= near
            other.wanted = NEAR_WANTED if both_near else 1.0
            other.direction = "<=" if both_near else "<"
        yield other


def _measured(
    lan: Lan, rows: Sequence[str], options: argparse.Namespace, gloo: Gloo
) -> tuple[dict[str, float], dict[str, float | None]]:
    """Ours and Gloo's seconds of each row "kind:bytes:rounds", one after the other."""
    ours = group_rows(lan, options.tls, rows, options.stored)
    return ours, gloo.cannot(rows) if options.tls else gloo.rows(lan, rows)


def _groups(lan: Lan, link: float, options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    kinds, rounds, n = options.kinds, options.rounds, options.n
    rows = [f"{kind}:{LARGE}:{rounds}" for kind in kinds]
    rows += [f"{kind}:{MIB}:{3 * rounds}" for kind in kinds if kind in KINDS[:3]]
    small = [kind for kind in ("barrier", *kinds) if kind in SMALL]
    rows += [f"{kind}:1024:{20 * rounds}" for kind in small]
    rows += [f"{STREAK}{kind}:1024:{rounds}" for kind in small]
    found, others = _measured(lan, rows, options, gloo)
    one_mib = [row for row in rows if f":{MIB}:" in row and not options.tls]
    floor = floor_rows(lan, one_mib) if one_mib else {}
    for row in rows:
        seconds = found[row]
        kind, size, _ = row.split(":")
        title = f"{kind} of {int(size) // 1024} KiB, {n} hosts"
        if kind.startswith(STREAK):
            kind = kind.removeprefix(STREAK)
            title = f"{kind} of 1 KiB, {n} hosts, in a row"
        if int(size) == 1024:
            small = Row(title, seconds, "s", wanted=_limit(options, SMALL[kind]))
            yield from _beside(small, row, others)
            continue
        bound = bound_s(kind, int(size), n, link)
        wanted = _limit(options, LARGE_WANTED[kind] if int(size) > MIB else MIB_WANTED)
        ours = _against(title, seconds, bound, None if options.tls else wanted)
        yield from _beside(ours, row, others)
        if floor.get(row) is not None:
            yield _against(f"{title}, the floor", float(floor[row] or 0), bound, None)


def _tls(lan: Lan, link: float, options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    rows = [f"{kind}:{LARGE}:{options.rounds}" for kind in ("broadcast", "allreduce")]
    others = gloo.cannot(rows)
    plain, found = group_rows(lan, False, rows), group_rows(lan, True, rows)
    for row in rows:
        seconds, kind = found[row], row.partition(":")[0]
        title = f"{kind} of {LARGE // 1024} KiB, {options.n} hosts, TLS"
        ours = _against(title, seconds, bound_s(kind, LARGE, options.n, link), None)
        yield from _beside(ours, row, others)
        without = beside(title, seconds, "s", "without TLS", plain[row])
        without.wanted = _limit(options, TLS_WANTED)
        yield without


def _processor(lan: Lan, link: float, options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    """Processor seconds of the whole machine for one call, beside what plain sockets need for the
    same bytes; and what these reach of the bound, because all hosts share this machine's cores."""
    rows = [f"{kind}:{LARGE}:{CPU_ROUNDS}" for kind in options.kinds]
    floor = floor_rows(lan, rows)
    found, others = _measured(lan, rows, options, gloo)
    for row in rows:
        kind, cpu = row.partition(":")[0], f"{row} cpu"
        title = f"{kind} of {LARGE // 1024} KiB, {options.n} hosts"
        if floor.get(row) is not None:
            bound = bound_s(kind, LARGE, options.n, link)
            yield _against(f"{title}, the floor", float(floor[row] or 0), bound, None)
            needed = beside(f"{title}, processor", found[cpu], "s", "floor", floor[cpu])
            needed.wanted = _limit(options, FLOOR_WANTED.get(kind))
            yield needed
        if cpu in others:
            needed = beside(f"{title}, processor", found[cpu], "s", Gloo.name, others[cpu])
            needed.wanted = _limit(options, GLOO_WANTED.get(kind))
            yield needed


def _apart(lan: Lan, link: float, options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    row = f"apart:{LARGE}:{options.rounds}"
    found, others = _measured(lan, [row], options, gloo)
    title = f"allreduce, ranks {APART_S} s apart, after the last"
    ours = _against(title, found[row], LARGE / link, _limit(options, (1.1, 1.22)))
    yield from _beside(ours, row, others)


def _refs(lan: Lan, link: float, options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    """Gloo has no tasks whose results it could take, no first k, and nobody joins it late."""
    n = options.n
    with cluster(lan, options.tls, 1, "1GiB") as address:
        found = ref_rows(lan[0], address, options.tls, (*REFS, "late"), LARGE, options.rounds, n)
    others = gloo.cannot((*REFS, "late"))
    for kind in REFS:
        bound = bound_s(kind.partition("_")[0], LARGE, n, link)
        title = f"refs: {kind.replace('_', ' ')} of 64 MiB, {n} hosts"
        wanted = LARGE_WANTED[kind.partition("_")[0]]
        ours = _against(title, found[kind], bound, _limit(options, wanted))
        yield from _beside(ours, kind, others)
    title = "refs: a receiver that joins a running broadcast"
    ours = _against(title, found["late"], LARGE / link, _limit(options, (1.03, 1.15)))
    yield from _beside(ours, "late", others)
    title = "refs: what the source of a broadcast sends, of its size"
    yield Row(title, found["sent"], "x", wanted=1.1)


def _unequal(options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    """Links of 1, 1, 1 and 0.25 Gbit/s: the slow one bounds everything that it takes part in."""
    rows = [f"{kind}:{LARGE}:{options.rounds + 2}" for kind in ("allreduce", "broadcast", "reduce")]
    with Lan(options.n, options.rate) as lan:
        link = link_rate(lan[0], lan[1])
        lan[options.n - 1].shape("250mbit", "250mbit")
        slow = link_rate(lan[0], lan[options.n - 1])
        found, others = _measured(lan, rows, options, gloo)
    print(f"unequal links: {link / 1e6:.1f} MB/s, one of {slow / 1e6:.1f} MB/s")
    for row in rows:
        title = f"{row.partition(':')[0]} of 64 MiB, one link of a quarter"
        yield from _beside(_against(title, found[row], LARGE / slow, 1.03), row, others)


def _narrow(options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    """Equal links, but between the source and one receiver a path of an eighth. The first rounds
    go by stripes, of which one lies on that path; once its rate is known they go by packed trees.
    """
    rounds = 2 * options.rounds + LEARNING
    with Lan(options.n, options.rate) as lan:
        link = link_rate(lan[0], lan[2])
        lan[1].narrow(lan[0], "125mbit")
        slow = link_rate(lan[0], lan[1])
        with cluster(lan, options.tls, 1, "1GiB") as address:
            about = lan[0], address, options.tls, ("broadcast",), LARGE, rounds, options.n
            found = ref_rounds(*about)["broadcast"]
    print(f"a narrow path: {link / 1e6:.1f} MB/s, one path of {slow / 1e6:.1f} MB/s")
    others = gloo.cannot(("broadcast",))
    title = "refs: broadcast of 64 MiB, one path of an eighth"
    first = _against(f"{title}, stripes", found[0], LARGE / link, None)
    yield from _beside(first, "broadcast", others)
    later = statistics.median(found[LEARNING:])
    yield from _beside(
        _against(f"{title}, packed trees", later, LARGE / link, 1.1), "broadcast", others
    )


def _fast(options: argparse.Namespace, gloo: Gloo) -> Iterator[Row]:
    rounds = 2 * options.rounds + 1
    send = f"send:{FAST}:{rounds}"
    with Lan(2, UNLIMITED) as lan:
        plain = link_rate(lan[0], lan[1], FAST)
        with cluster(lan, options.tls, 1, "2GiB") as address:
            found = ref_rows(lan[0], address, options.tls, ("broadcast",), FAST, rounds, 2)
        others = gloo.cannot([send]) if options.tls else gloo.rows(lan, [send])
    speed = FAST / found["broadcast"]
    ours = Row(
        "256 MiB to another host, links not limited",
        speed / 1e9, "GB/s", "plain socket", plain / 1e9,
        ratio=speed / plain, wanted=0.95, direction=">=",
    )  # fmt: skip
    speeds = {row: s if s is None else FAST / s / 1e9 for row, s in others.items()}
    yield from _beside(ours, send, speeds)
    call = f"allreduce:{LARGE}:{rounds}"
    with Lan(options.n, UNLIMITED) as lan:
        calls, others = _measured(lan, [call], options, gloo)
        floor = floor_rows(lan, [call])
    title = f"allreduce of 64 MiB, {options.n} hosts, links not limited"
    if call in others:
        ours = beside(title, calls[call], "s", Gloo.name, others[call])
        ours.wanted = 0.75
        yield ours
        if floor.get(call) is not None:
            yield beside(
                f"{title}, the floor", float(floor[call] or 0), "s", Gloo.name, others[call]
            )


if __name__ == "__main__":
    sys.exit(main())
