"""The table of the benchmarks: plain text, one line per row."""

from __future__ import annotations

from typing import Any

from hoplite_mp._cli.table import table as aligned


def table(rows: list[dict[str, Any]]) -> str:
    """Plain text, one line for each row; a title that repeats is not printed again."""
    lines = [("", "ours", "beside it", "", "ratio", "target", "")]
    last = None
    for row in rows:
        wanted, ratio = row["wanted"], row["ratio"]
        amount = row["reference_value"]
        other = "cannot" if row["reference"] else ""
        if amount is not None:
            other = value(amount, row["unit"])
        target = ""
        if wanted is not None:
            sign = {"<=": "≤", ">=": "≥", "<": "<"}[row["direction"]]
            target = f"{sign} {number(wanted) if ratio is not None else value(wanted, row['unit'])}"
        same = row["title"] == last
        last = row["title"]
        lines.append(
            (
                "" if same else row["title"],
                "" if same else value(row["ours"], row["unit"]),
                row["reference"],
                other,
                "" if ratio is None else number(ratio),
                target,
                {None: "", True: "met", False: "NOT MET"}[row["met"]],
            )
        )
    texts = aligned(lines, right=(1, 3, 4, 5))
    return "\n".join([texts[0], "─" * max(map(len, texts)), *texts[1:]])


def value(amount: float, unit: str) -> str:
    """With its unit, and three digits that tell something."""
    if unit != "s":
        return f"{number(amount)} {unit}"
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(amount) * factor >= 0.9995 or name == "µs":
            return f"{number(amount * factor)} {name}"
    raise AssertionError


def number(amount: float) -> str:
    """Three digits, or all before the point."""
    size = abs(amount)
    if size >= 99.95:
        return f"{amount:,.0f}".replace(",", " ")
    if size >= 9.995:
        return f"{amount:.1f}"
    return f"{amount:.2f}" if size >= 0.0995 or size == 0 else f"{amount:.3f}"
