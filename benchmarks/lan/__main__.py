"""`python -m benchmarks.lan [-n 4] [--sections ...]`: collectives over emulated hosts.

Needs root. The bound of each row is that of a star of links (Blink, MLSys 2020; the table in
docs/architecture.md). groups: Group calls. refs: collectives on results of tasks. apart: ranks that
arrive 0.3 s after each other. unequal: one link of a quarter. fast: links that nothing limits.
Everything found is left in benchmarks/results/lan-*.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from benchmarks.common import MIB, ROOT, Row
from benchmarks.lan.groups import group_rows
from benchmarks.lan.hosts import bound_s, cluster, link_rate
from benchmarks.lan.refs import ref_rows
from benchmarks.report import table as drawn
from tests.lan import UNLIMITED, Lan, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

KINDS = ("broadcast", "reduce", "allreduce", "gather", "allgather", "reduce_scatter")
SECTIONS = ("groups", "refs", "apart", "unequal", "fast")
SMALL = {"broadcast": (0.35e-3, 2e-3), "allreduce": (1e-3, 4e-3)}  # seconds, few and many hosts
REFS = ("reduce", "reduce_num", "allreduce", "broadcast", "gather")
MANY = 4  # hosts; beyond, the second number of a target counts
LARGE, FAST = 64 * MIB, 256 * MIB
APART_S = 0.3


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether targets are met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan", description=__doc__)
    parser.add_argument("-n", type=int, default=4, help="hosts (%(default)s)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc has it")
    parser.add_argument("--tls", action="store_true", help="with TLS")
    parser.add_argument("--sections", nargs="*", default=SECTIONS, choices=SECTIONS)
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="of the Group calls")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    table: list[Row] = []
    if {"groups", "refs", "apart"} & set(options.sections):
        with Lan(options.n, options.rate) as lan:
            link = link_rate(lan[0], lan[1])
            print(f"links: {link / 1e6:.1f} MB/s each way, {'TLS' if options.tls else 'no TLS'}")
            if "groups" in options.sections:
                table += _groups(lan, link, options)
            if "apart" in options.sections:
                table += _apart(lan, link, options)
            if "refs" in options.sections:
                table += _refs(lan, link, options)
    if "unequal" in options.sections and options.n == MANY:
        table += _unequal(options)
    if "fast" in options.sections:
        table += _fast(options)
    print(drawn([row.as_dict() for row in table]))
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    name = f"lan-{options.n}{'-tls' if options.tls else ''}.json"
    (results / name).write_text(json.dumps([row.as_dict() for row in table], indent=1))
    return 0


def _limit(options: argparse.Namespace, few: float, many: float) -> float:
    return few if options.n <= MANY else many


def _against(title: str, seconds: float, bound: float, wanted: float | None) -> Row:
    return Row(title, seconds, "s", "bound", bound, ratio=seconds / bound, wanted=wanted)


def _groups(lan: Lan, link: float, options: argparse.Namespace) -> Iterator[Row]:
    kinds, rounds, n = options.kinds, options.rounds, options.n
    rows = [f"{kind}:{LARGE}:{rounds}" for kind in kinds]
    rows += [f"{kind}:{MIB}:{3 * rounds}" for kind in kinds if kind in KINDS[:3]]
    rows += [f"{kind}:1024:{20 * rounds}" for kind in kinds if kind in SMALL]
    for row, seconds in group_rows(lan, options.tls, rows).items():
        kind, size, _ = row.split(":")
        title = f"{kind} of {int(size) // 1024} KiB, {n} hosts"
        if int(size) == 1024:
            yield Row(title, seconds, "s", wanted=_limit(options, *SMALL[kind]))
            continue
        wanted = _limit(options, 1.05, 1.08) if int(size) > MIB else _limit(options, 1.6, 2.0)
        wanted = 1.15 if options.tls else wanted
        yield _against(title, seconds, bound_s(kind, int(size), n, link), wanted)


def _apart(lan: Lan, link: float, options: argparse.Namespace) -> Iterator[Row]:
    row = f"apart:{LARGE}:{options.rounds}"
    seconds = group_rows(lan, options.tls, [row])[row]
    title = f"allreduce, ranks {APART_S} s apart, after the last"
    yield _against(title, seconds, LARGE / link, _limit(options, 1.15, 1.2))


def _refs(lan: Lan, link: float, options: argparse.Namespace) -> Iterator[Row]:
    n = options.n
    with cluster(lan, options.tls, 1, "1GiB") as address:
        found = ref_rows(lan[0], address, options.tls, (*REFS, "late"), LARGE, options.rounds, n)
    for kind in REFS:
        bound = bound_s(kind.partition("_")[0], LARGE, n, link)
        title = f"refs: {kind.replace('_', ' ')} of 64 MiB, {n} hosts"
        yield _against(title, found[kind], bound, _limit(options, 1.08, 1.12))
    title = "refs: a receiver that joins a running broadcast"
    yield _against(title, found["late"], LARGE / link, _limit(options, 1.15, 1.2))
    title = "refs: what the source of a broadcast sends, of its size"
    yield Row(title, found["sent"], "x", wanted=1.1)


def _unequal(options: argparse.Namespace) -> Iterator[Row]:
    """Links of 1, 1, 1 and 0.25 Gbit/s: the slow one bounds everything that it takes part in."""
    with Lan(options.n, options.rate) as lan:
        link = link_rate(lan[0], lan[1])
        lan[options.n - 1].shape("250mbit", "250mbit")
        slow = link_rate(lan[0], lan[options.n - 1])
        kinds = ("allreduce", "broadcast", "reduce")
        rows = [f"{kind}:{LARGE}:{options.rounds + 2}" for kind in kinds]
        found = group_rows(lan, options.tls, rows)
    print(f"unequal links: {link / 1e6:.1f} MB/s, one of {slow / 1e6:.1f} MB/s")
    for kind, seconds in zip(kinds, found.values(), strict=True):
        yield _against(f"{kind} of 64 MiB, one link of a quarter", seconds, LARGE / slow, 1.15)


def _fast(options: argparse.Namespace) -> Iterator[Row]:
    with Lan(2, UNLIMITED) as lan:
        plain = link_rate(lan[0], lan[1], FAST)
        with cluster(lan, options.tls, 1, "2GiB") as address:
            kinds, rounds = ("broadcast",), 2 * options.rounds + 1
            found = ref_rows(lan[0], address, options.tls, kinds, FAST, rounds, 2)
    speed = FAST / found["broadcast"]
    yield Row(
        "256 MiB to another host, links not limited",
        speed / 1e9, "GB/s", "plain socket", plain / 1e9,
        ratio=speed / plain, wanted=0.8, direction=">=",
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
