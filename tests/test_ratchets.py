"""Figures of the node's structure that may only fall.

Why it exists: docs/architecture.md says how rooms are to depend on each other, and the node is not
there yet. What is counted here is written down in ratchets.json. A change that makes a figure
larger fails, and one that makes it smaller writes it down:

    python -m tests.test_ratchets --tighten
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "hoplite_mp"
WRITTEN = Path(__file__).with_name("ratchets.json")
# Outside the shell a room has no way to the operating system but the node's ports.
SYSTEM = {"time", "socket", "select", "threading", "os", "signal"}
HALLS = {"node", "lan"}  # objects through which rooms reach into other rooms
ROOMS = ("node", "simulation", "client", "serial")
LINES_MAX = 500


def modules(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


def system_uses(tree: ast.AST) -> int:
    """Attributes that are taken of modules of the operating system."""
    return sum(
        isinstance(one, ast.Attribute)
        and isinstance(one.value, ast.Name)
        and one.value.id in SYSTEM
        for one in ast.walk(tree)
    )


def reaches(tree: ast.AST) -> int:
    """Attributes that are taken of a hall object: node.x, self.node.x, self.node.lan.x."""

    def is_hall(value: ast.expr) -> bool:
        if isinstance(value, ast.Name):
            return value.id in HALLS
        return isinstance(value, ast.Attribute) and value.attr in HALLS

    return sum(isinstance(one, ast.Attribute) and is_hall(one.value) for one in ast.walk(tree))


def empty_callbacks(tree: ast.AST) -> int:
    """Attributes that hold a function which does nothing until somebody assigns another one."""
    found = 0
    for one in ast.walk(tree):
        if isinstance(one, ast.AnnAssign) and isinstance(one.value, ast.Lambda):
            found += isinstance(one.target, ast.Attribute)
    return found


def in_circles(room: str) -> int:
    """Files of a room from which imports lead back to them, those for type checking included."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path
        for path in modules(room)
    }
    leads: dict[str, set[str]] = {}
    for name, path in names.items():
        targets: set[str] = set()
        for one in ast.walk(ast.parse(path.read_text())):
            if isinstance(one, ast.ImportFrom) and one.module:
                both = {one.module, *(f"{one.module}.{alias.name}" for alias in one.names)}
                targets |= both & names.keys()
        leads[name] = targets - {name}
    found = 0
    for name in names:
        seen, ahead = set[str](), list(leads[name])
        while ahead:
            other = ahead.pop()
            if other not in seen:
                seen.add(other)
                ahead += leads[other]
        found += name in seen
    return found


@functools.cache
def figures() -> dict[str, dict[str, int]]:
    """All that is counted; zeros are left out."""
    found: dict[str, Counter[str]] = {
        "system calls outside the shell": Counter(),
        "reaches through a hall object": Counter(),
        "callbacks that do nothing": Counter(),
        "lines beyond the limit": Counter(),
    }
    for path in modules("node"):
        name, text = str(path.relative_to(PACKAGE)), path.read_text()
        tree = ast.parse(text)
        if "shell" not in path.parts:
            found["system calls outside the shell"][name] = system_uses(tree)
        found["reaches through a hall object"][name] = reaches(tree)
        found["callbacks that do nothing"][name] = empty_callbacks(tree)
        found["lines beyond the limit"][name] = max(0, text.count("\n") - LINES_MAX)
    circles = {room: in_circles(room) for room in ROOMS}
    return {
        kind: {name: count for name, count in sorted(counts.items()) if count}
        for kind, counts in {**found, "files in circles of imports": circles}.items()
    }


@pytest.mark.parametrize("kind", json.loads(WRITTEN.read_text()) if WRITTEN.exists() else ())
def test_no_figure_has_risen(kind: str) -> None:
    now, before = figures()[kind], json.loads(WRITTEN.read_text())[kind]
    risen = {name: (before.get(name, 0), n) for name, n in now.items() if n > before.get(name, 0)}
    assert not risen, f"{kind}: {risen}; (before, now)"


@pytest.mark.parametrize("kind", json.loads(WRITTEN.read_text()) if WRITTEN.exists() else ())
def test_what_has_fallen_is_written_down(kind: str) -> None:
    now, before = figures()[kind], json.loads(WRITTEN.read_text())[kind]
    fallen = {name: (n, now.get(name, 0)) for name, n in before.items() if n > now.get(name, 0)}
    assert not fallen, f"{kind}: {fallen}: run python -m tests.test_ratchets --tighten"


def test_every_figure_is_written_down() -> None:
    assert figures().keys() == json.loads(WRITTEN.read_text()).keys()


if __name__ == "__main__":
    print({kind: sum(counts.values()) for kind, counts in figures().items()})
    if "--tighten" in sys.argv:
        WRITTEN.write_text(json.dumps(figures(), indent=1) + "\n")
