"""Draws what was measured of applications: `python docs/applications.py`.

docs/applications.md compares whole applications on emulated hosts. Its pictures and its tables come
from docs/applications/figures.json alone, so that none is out of date; `python -m
benchmarks.applications --publish` writes that file. The file also has the targets, and what
each case used of the links, the processors and the memory, which the page leaves out.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import itertools

from svg import COLOURS, EDGE, GREY, INK, Drawing

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "applications"
PAGE = HERE / "applications.md"
BEGIN, END = "<!-- tables of figures.json -->", "<!-- end of the tables -->"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BELOW = 720, 330, 64, 24, 74, 42


def figures() -> dict[str, Any]:
    """What has been measured."""
    found: dict[str, Any] = json.loads((FOLDER / "figures.json").read_text(encoding="utf-8"))
    return found


def nice(most: float) -> float:
    """A step of an axis that has at most six of them up to there."""
    rough = max(most, 1e-9) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * one for one in (1, 2, 5, 10) if power * one >= rough)


def drawing(picture: dict[str, Any]) -> str:
    """Lines over seconds."""
    d = Drawing(WIDTH, HEIGHT, picture["title"])
    d.text(16, 24, picture["title"], bold=True)
    points = [point for line in picture["lines"] for point in line["points"]]
    last, most = max(x for x, _ in points) or 1.0, max(y for _, y in points) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BELOW
        return LEFT + x / last * across, HEIGHT - BELOW - y / (most * 1.05) * up

    for number in range(int(most * 1.05 / nice(most)) + 1):
        y = number * nice(most)
        d.line(*place(0, y), *place(last, y), EDGE)
        d.text(LEFT - 6, place(0, y)[1] + 4, f"{y:g}", anchor="end", colour=GREY, size=11)
    for number in range(int(last / nice(last)) + 1):
        x = number * nice(last)
        d.text(
            place(x, 0)[0],
            HEIGHT - BELOW + 18,
            f"{x:g} {picture.get('x', 's')}",
            anchor="middle",
            colour=GREY,
            size=11,
        )
    d.text(16, TOP - 8, picture["y"], colour=GREY, size=11)
    for word, at in picture["marks"].items():
        x, top = place(at, most * 1.05)
        d.line(x, top, x, HEIGHT - BELOW, INK, dash="4 3")
        d.text(x + 4, top + 10, word, colour=INK, size=11)
    at = LEFT
    for line, colour in zip(picture["lines"], COLOURS, strict=False):
        placed = [place(x, y) for x, y in line["points"]]
        for one, other in itertools.pairwise(placed):
            d.line(*one, *other, colour, width=2)
        d.line(at, 42, at + 18, 42, colour, width=3)
        d.text(at + 24, 46, line["label"], colour=colour)
        at += 50 + 8 * len(line["label"])
    return d.whole()


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def tables() -> str:
    """All tables, and when what they say was measured."""
    found = figures()
    parts = []
    if found["quick"]:
        parts.append(
            "**Measured in short runs (`--quick`) on a machine that did other things meanwhile: "
            "read the ratios, and those with care.**"
        )
    begin, end = found["measured"]
    took = f"{found['took_s'] / 60:.0f} minutes"
    parts.append(f"Measured from {begin} to {end}; all cases together took {took}.")
    for table in found["tables"]:
        parts.append(f"## {table['name']}")
        if table["lines"]:
            shown = [n for n, name in enumerate(table["head"][:-1]) if name != "target"]
            rows = [[line[n] for n in shown] for line in table["lines"]]
            compared = [row[:2] for row in rows if row[2]]
            rows = [row for row in rows if row[2] or row[:2] not in compared]
            parts.append(markdown([table["head"][n] for n in shown], rows))
        parts += [
            f"![{found['pictures'][name]['title']}](applications/{name}.svg)"
            for name in table["pictures"]
        ]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """The page's text with these tables in it."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


PICTURES = {f"{name}.svg": drawing(one) for name, one in figures()["pictures"].items()}


def main() -> None:
    """Write all."""
    for old in FOLDER.glob("*.svg"):
        old.unlink()
    for name, text in PICTURES.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
