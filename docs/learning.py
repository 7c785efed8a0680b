"""Draws what the experiments of hoplite_mp.ml measured: `python docs/learning.py`.

The figures, and the table of docs/learning.md, come from docs/learning/*.json alone; `python -m
benchmarks.learning` writes these files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from applications import drawing, markdown

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "learning"
PAGE = HERE / "learning.md"
BEGIN, END = "<!-- table of learning/*.json -->", "<!-- end of the table -->"
HEAD = ["method", "published", "measured here", "kind", "to reach", "where it does not hold"]


def records() -> list[dict[str, Any]]:
    """What has been measured, in the order of the names."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(FOLDER.glob("*.json"))]


def figure(record: dict[str, Any]) -> str:
    """The curves of one experiment."""
    lines = record["lines"]
    titles = {"title": record["title"], "x": record["x"], "y": record["y"]}
    return drawing(titles | {"marks": {}, "lines": lines})


def rows(record: dict[str, Any]) -> list[list[str]]:
    """The lines of the table for one experiment: one for each measure."""
    found = []
    for at, one in enumerate(record["measures"]):
        bound = "≥" if one["at_least"] else "≤"
        found.append(
            [
                record["title"] if at == 0 else "",
                record["source"] if at == 0 else "",
                f"{one['what']}: {one['value']:.3g}",
                one["kind"],
                "" if one["target"] is None else f"{bound} {one['target']:g}",
                " ".join(record["limits"]) if at == 0 else "",
            ]
        )
    return found


def page(text: str) -> str:
    """docs/learning.md with the table as measured."""
    lines = [line for record in records() for line in rows(record)]
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{markdown(HEAD, lines)}\n\n{END}{after}"


def main() -> None:
    for record in records():
        if record["lines"]:
            path = FOLDER / f"{record['name']}.svg"
            path.write_text(figure(record), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
