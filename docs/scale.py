"""Draws what `hoplite-mp simulate --json FILE` has written: `python docs/scale.py FILE... OUT.svg`.

docs/scale.md shows how plans do where no test has been. One panel for each file, one line for each
operation: how many times the bound it takes, over the number of nodes, both in powers of two. The
colours are told apart by colour-blind eyes, and read on a light and on a dark page.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "broadcast": "#0072b2",
    "get": "#d55e00",
    "reduce": "#009e73",
    "allreduce": "#cc79a7",
    "reduce_scatter": "#b8860b",
}
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BELOW = 420, 320, 46, 40, 108, 40
GREY = "#808080"


class Panel:
    """One table as a picture."""

    def __init__(self, table: dict[str, Any], at: int) -> None:
        self.at = at
        self.rows = table["rows"]
        self.rate = table["rate"]
        nodes = [row["nodes"] for row in self.rows]
        self.least, self.most = math.log2(min(nodes)), math.log2(max(nodes))
        self.top = math.ceil(math.log2(max(row["ratio"] for row in self.rows)) * 2) / 2 or 0.5
        self.parts: list[str] = []

    def x(self, nodes: float) -> float:
        share = (math.log2(nodes) - self.least) / (self.most - self.least)
        return self.at + LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, ratio: float) -> float:
        return TOP + (1 - math.log2(max(1, ratio)) / self.top) * (HEIGHT - TOP - BELOW)

    def text(self, x: float, y: float, words: str, anchor: str, colour: str = GREY) -> None:
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'
        )

    def line(self, points: list[tuple[float, float]], colour: str, width: float) -> None:
        listed = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{listed}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
        )

    def draw(self) -> str:
        nbytes = self.rows[0]["nbytes"] / 2**20
        title = f"{nbytes:g} MiB at {self.rate * 8e-9:g} Gbit/s: time ÷ bound"
        self.text(self.at + LEFT, TOP - 16, title, "start")
        for step in range(int(self.top) + 1):
            y = self.y(2**step)
            self.line([(self.at + LEFT, y), (self.at + WIDTH - RIGHT, y)], GREY, 0.4)
            self.text(self.at + LEFT - 6, y + 4, f"{2**step}", "end")
        for nodes in sorted({row["nodes"] for row in self.rows}):
            self.text(self.x(nodes), HEIGHT - BELOW + 16, f"{nodes}", "middle")
        self.text(self.x(2 ** ((self.least + self.most) / 2)), HEIGHT - 8, "nodes", "middle")
        ends = []
        for name in dict.fromkeys(row["operation"] for row in self.rows):
            mine = [row for row in self.rows if row["operation"] == name]
            points = [(self.x(row["nodes"]), self.y(row["ratio"])) for row in mine]
            self.line(points, COLOURS.get(name, GREY), 2)
            for x, y in points:
                self.parts.append(
                    f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{COLOURS.get(name, GREY)}"/>'
                )
            ends.append((points[-1][1], name))
        below = -math.inf
        for y, name in sorted(ends):  # no two labels at one height
            below = max(y, below + 14)
            colour = COLOURS.get(name, GREY)
            self.text(self.at + WIDTH - RIGHT + 8, below + 4, name, "start", colour)
        return "\n".join(self.parts)


def main(files: list[str], out: str) -> None:
    """All tables side by side."""
    panels = [
        Panel(json.loads(Path(name).read_text(encoding="utf-8")), index * WIDTH)
        for index, name in enumerate(files)
    ]
    whole = WIDTH * len(panels)
    drawn = "\n".join(panel.draw() for panel in panels)
    Path(out).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11">\n{drawn}\n</svg>\n',
        encoding="utf-8",
    )


if __name__ == "__main__":
    main(sys.argv[1:-1], sys.argv[-1])
