"""Text tables, and the format of times in their cells."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["format_seconds", "table", "three_digits"]


def table(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table, with columns two spaces apart. right: right-aligned columns. Cells may
    have several lines."""
    lines = [line for row in rows for line in zip_longest(*map(str.splitlines, row), fillvalue="")]
    columns = []
    for at, column in enumerate(zip(*lines, strict=True)):
        align, width = str.rjust if at in right else str.ljust, max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


def format_seconds(seconds: float) -> str:
    """0.0145 -> "14.5 ms"."""
    for name, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or name == "µs":
            return f"{three_digits(seconds * factor)} {name}"
    raise AssertionError


def three_digits(value: float) -> str:
    """The value with three significant digits, or all digits of the integer part."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
