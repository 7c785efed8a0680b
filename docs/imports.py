"""Draws which folders of the node import which: `python docs/imports.py`.

The rule that imports lead down is read from the files, and so is this picture of it. An arrow that
follows from two others is left out.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import SHADE, Drawing

HERE = Path(__file__).resolve().parent
NODE = HERE.parent / "hoplite_mp" / "_node"
PACKAGE = "hoplite_mp._node"
SHARED = "ports and tables"  # the files that stand beside the folders
WORDS = {
    "runtime": "loop, dispatch, construction",
    "manager_link": "joining, failover",
    "diagnostics": "traces, dumps, counters",
    "groups": "calls of Groups",
    "actors": "local, remote, failover",
    "collectives": "operations on refs",
    "execution": "plans as cells",
    "lineage": "reconstruction",
    "tasks": "workers, resources",
    "peers": "other nodes",
    "output": "lines of workers",
    "objects": "imports, exports, leases",
    "store": "budget, pages",
    "io": "the operating system",
    SHARED: "",
}
BOX, HEIGHT, STEP, MARGIN = 164, 46, 92, 24


def folder_of(parts: tuple[str, ...]) -> str:
    """Of a module below the node."""
    return parts[0] if (NODE / parts[0]).is_dir() else SHARED


def edges() -> dict[str, set[str]]:
    """Which folder imports from which, for type checking too."""
    found: dict[str, set[str]] = {name: set() for name in WORDS}
    for path in sorted(NODE.rglob("*.py")):
        of = folder_of(path.relative_to(NODE).parts)
        for statement in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                module = statement.module
                if module.startswith(PACKAGE + "."):
                    found[of].add(folder_of(tuple(module.split(".")[2:])))
    return {of: to - {of} for of, to in found.items()}


def reach(of: str, all_: dict[str, set[str]]) -> set[str]:
    """All that is below that folder."""
    below: set[str] = set()
    for to in all_[of]:
        below |= {to} | reach(to, all_)
    return below


def node_imports() -> str:
    """Rows of folders, each above all that it imports."""
    all_ = edges()
    floors: dict[str, int] = {}
    for name in sorted(all_, key=lambda one: len(reach(one, all_))):
        floors[name] = 1 + max((floors[to] for to in all_[name]), default=-1)
    top = max(floors.values())
    rows = [[name for name in WORDS if floors[name] == floor] for floor in range(top + 1)]
    width = MARGIN * 2 + max(map(len, rows)) * (BOX + MARGIN) - MARGIN
    d = Drawing(width, MARGIN * 2 + top * STEP + HEIGHT, "Folders of the node and their imports")
    at: dict[str, tuple[float, float]] = {}
    for floor, row in enumerate(rows):
        span = len(row) * (BOX + MARGIN) - MARGIN
        for number, name in enumerate(row):
            x = (width - span) / 2 + number * (BOX + MARGIN)
            at[name] = x, MARGIN + (top - floor) * STEP
    for of, below in all_.items():
        direct = below - {far for to in below for far in reach(to, all_)}
        for to in sorted(direct):
            d.arrow((at[of][0] + BOX / 2, at[of][1] + HEIGHT), (at[to][0] + BOX / 2, at[to][1] - 2))
    for name, (x, y) in at.items():
        title = name if name == SHARED else f"{name}/"
        d.labelled(x, y, BOX, HEIGHT, *filter(None, (title, WORDS[name])), fill=SHADE)
    return d.whole()


PICTURES = {"node_imports.svg": node_imports}


def main() -> None:
    """Write all."""
    for name, draw in PICTURES.items():
        (HERE / "pictures" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
