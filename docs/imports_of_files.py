"""Draws which files of the node imported which, before it got folders and after.

Why it exists: the change was made so that no import leads back to where it came from. Each panel is
a dependency structure matrix (Steward 1981): a dot in a row means that the file of this row imports
the file of that column. Files stand in the order in which they can be read, so an import that leads
back is a dot above the diagonal, and files that import each other in a circle share a box.

    python docs/imports_of_files.py [NAME REVISION]

With arguments: first reads that revision into imports_of_files.json, under that name.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import COLOURS, EDGE, GREY, SHADE, Drawing

HERE = Path(__file__).resolve().parent
KEPT = HERE / "imports_of_files.json"
FOLDER, PACKAGE = "hoplite_mp/_node/", "hoplite_mp._node"
CELL, MARGIN, TOP = 4, 24, 54
CIRCLE = COLOURS[4]


def read(revision: str) -> dict[str, list[str]]:
    """Which files each file of the node imports in that revision, for type checking too."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=HERE.parent, capture_output=True, text=True, check=True
        ).stdout

    names = git("ls-tree", "-r", "--name-only", revision, FOLDER).split()
    files = {
        name.removeprefix(FOLDER).removesuffix(".py").replace("/", "."): git(
            "show", f"{revision}:{name}"
        )
        for name in names
        if name.endswith(".py") and not name.endswith("__init__.py")
    }
    found: dict[str, list[str]] = {}
    for of, text in files.items():
        to: set[str] = set()
        for statement in ast.walk(ast.parse(text)):
            if isinstance(statement, ast.ImportFrom) and statement.module:
                module = f"{statement.module}.".removeprefix(f"{PACKAGE}.").rstrip(".")
                to |= {module, *(f"{module}.{one.name}".lstrip(".") for one in statement.names)}
        found[of] = sorted(to & (files.keys() - {of}))
    return found


def circles(imports: dict[str, list[str]]) -> list[list[str]]:
    """Sets of files that import each other, each set above those that it imports (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(one: str) -> None:
        index[one] = low[one] = len(index)
        stack.append(one)
        for to in imports[one]:
            if to not in index:
                visit(to)
            if to in stack:
                low[one] = min(low[one], low[to])
        if low[one] == index[one]:
            at = stack.index(one)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for one in sorted(imports):
        if one not in index:
            visit(one)
    return found


def panel(d: Drawing, x: float, when: str, imports: dict[str, list[str]]) -> None:
    """One matrix, with what it shows written above."""
    sets = circles(imports)
    order = [one for each in sets for one in each]
    place = {one: at for at, one in enumerate(order)}
    side = len(order) * CELL
    folders = {one.rpartition(".")[0] for one in order}
    where = "one folder" if len(folders) == 1 else f"{len(folders)} folders"
    largest = max(map(len, sets))
    circle = "no circle" if largest == 1 else f"a circle of {largest} files"
    d.text(x, MARGIN + 4, when, bold=True)
    d.text(x, MARGIN + 20, f"{len(order)} files in {where}, {circle}", colour=GREY)
    d.box(x, TOP, side, side, fill="#ffffff", stroke=EDGE)
    for each in sets:
        if len(each) > 1:
            first = place[each[0]] * CELL
            wide = len(each) * CELL
            d.box(x + first, TOP + first, wide, wide, fill=SHADE, stroke=CIRCLE)
    for of, below in imports.items():
        for to in below:
            back = place[to] > place[of]
            d.parts.append(
                f'<rect x="{x + place[to] * CELL:g}" y="{TOP + place[of] * CELL:g}" '
                f'width="{CELL - 1}" height="{CELL - 1}" fill="{CIRCLE if back else COLOURS[0]}"/>'
            )


def node_files() -> str:
    """All revisions that were kept, beside each other."""
    kept: dict[str, dict[str, list[str]]] = json.loads(KEPT.read_text(encoding="utf-8"))
    sides = [len(imports) * CELL for imports in kept.values()]
    width = sum(sides) + MARGIN * (len(sides) + 1)
    d = Drawing(width, TOP + max(sides) + MARGIN, "Imports among the node's files, then and now")
    x = MARGIN
    for side, (when, imports) in zip(sides, kept.items(), strict=True):
        panel(d, x, when, imports)
        x += side + MARGIN
    return d.whole()


PICTURES = {"node_files.svg": node_files}


def main(arguments: list[str]) -> None:
    """Write all."""
    if arguments:
        name, revision = arguments
        kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
        KEPT.write_text(json.dumps({**kept, name: read(revision)}, indent=0) + "\n")
    for name, draw in PICTURES.items():
        (HERE / "pictures" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
