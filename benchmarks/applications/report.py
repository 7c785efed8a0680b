"""Prints the saved results as a table. Cases without a result are left out."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.report import number, value
from hoplite_mp._cli.table import table as aligned

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from benchmarks.applications.cases import Application, Comparison

__all__ = ["compared", "results", "text", "used"]

HEAD = ("what", "", "beside it", "ratio", "target", "links allow", "")
USED = ("case", "s", "busiest link", "of it used", "processors", "memory at most")


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """By the name of the case."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def compared(
    found: dict[str, dict[str, Any]], comparisons: Iterable[Comparison]
) -> list[tuple[str, ...]]:
    """A line for each comparison whose cases are there; cells as in HEAD."""
    lines = []
    for one in comparisons:
        mine = found.get(one.ours)
        other = found.get(one.other) if one.other is not None else None
        if mine is None or (one.other is not None and other is None):
            continue
        lines.append(_line(one, mine, other))
    return lines


def _line(one: Comparison, mine: dict[str, Any], other: dict[str, Any] | None) -> tuple[str, ...]:
    amount = one.number(mine)
    looked_at, beside, ratio = amount, "", ""
    if other is not None:
        theirs = one.number(other)
        beside = f"{other['label']} {value(theirs, one.unit)}"
        if theirs:
            looked_at = amount / theirs
            ratio = number(looked_at)
    target = met = ""
    if one.wanted is not None:
        sign = {"<=": "≤", ">=": "≥"}[one.direction]
        target = (
            f"{sign} {number(one.wanted) if other is not None else value(one.wanted, one.unit)}"
        )
        enough = looked_at >= one.wanted if one.direction == ">=" else looked_at <= one.wanted
        met = "met" if enough and (other is None or ratio) else "NOT MET"
    links = "" if one.links is None else number(one.links)
    return (one.title, value(amount, one.unit), beside, ratio, target, links, met)


def used(found: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """What each case has used; cells as in USED. Bytes over a link are counted with their headers,
    and the link's rate is that of a plain socket, so a link may be used more than fully."""
    lines = []
    for name, result in found.items():
        usage = result.get("usage")
        if not usage:
            continue
        seconds, busiest = usage["seconds"], usage["busiest_link_bytes"]
        lines.append(
            (
                name,
                number(seconds),
                f"{number(busiest / 1e6)} MB",
                f"{busiest / seconds / result['link_bytes_per_s']:.0%}",
                number(usage["cpu_s"] / seconds),
                f"{number(usage['memory_peak_bytes'] / 1e9)} GB",
            )
        )
    return lines


def text(head: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """In columns."""
    rows = aligned([head, *lines])
    return "\n".join([rows[0], "─" * max(map(len, rows)), *rows[1:]])


def printed(found: dict[str, dict[str, Any]], applications: Iterable[Application]) -> str:
    """Everything there is to say."""
    parts = []
    for application in applications:
        names = {case.name for case in application.cases}
        mine = {name: result for name, result in found.items() if name in names}
        if not mine:
            continue
        parts.append(f"{application.name}\n\n{text(HEAD, compared(mine, application.comparisons))}")
        parts.append(text(USED, used(mine)))
    return "\n\n".join(parts)
