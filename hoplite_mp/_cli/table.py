"""Text tables."""

from __future__ import annotations

from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

__all__ = ["table"]


def table(rows: Iterable[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table, with columns two spaces apart. `right`: the indices of the
    right-aligned columns. Cells may have several lines."""
    lines = [line for row in rows for line in zip_longest(*map(str.splitlines, row), fillvalue="")]
    columns = []
    for at, column in enumerate(zip(*lines, strict=True)):
        align, width = str.rjust if at in right else str.ljust, max(map(len, column))
        columns.append([align(cell, width) for cell in column])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]
