"""Figures of the node's structure that may only fall.

docs/architecture.md says how components are to depend on each other. How far the node is from that
is counted here, and written down in ratchets.json. A change that makes a figure larger fails, and
one that makes it smaller writes it down:

    python -m tests.test_ratchets --tighten
"""

from __future__ import annotations

import ast
import functools
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Container

PACKAGE = Path(__file__).parent.parent / "hoplite_mp"
WRITTEN = Path(__file__).with_name("ratchets.json")
# Outside `io/` a component has no way to the operating system but the node's ports.
SYSTEM = {"time", "socket", "select", "threading", "os", "signal"}
HALLS = {
    "node",
    "lan",
    "cluster_node",
}  # objects through which components reach into other components
PROCESS = "main.py"  # what makes the ports, and runs the loop: as much of `io/` as that folder


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


def imported(tree: ast.AST, names: Container[str]) -> set[str]:
    """Modules of ours that are imported anywhere in a file, for type checking, too."""
    found: set[str] = set()
    for one in ast.walk(tree):
        if isinstance(one, ast.ImportFrom) and one.module:
            for alias in one.names:
                if f"{one.module}.{alias.name}" in names:
                    found.add(f"{one.module}.{alias.name}")
                elif one.module in names and not alias.name.startswith("_"):  # else it is compiled
                    found.add(one.module)
    return found


def in_circles() -> Counter[str]:
    """Files from which imports lead back to them, by package."""
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in modules("")
    }
    leads = {
        name: imported(ast.parse(path.read_text()), paths) - {name} for name, path in paths.items()
    }
    found: Counter[str] = Counter()
    for name, path in paths.items():
        seen, ahead = set[str](), list(leads[name])
        while ahead:
            other = ahead.pop()
            if other not in seen:
                seen.add(other)
                ahead += leads[other]
        found[path.relative_to(PACKAGE).parts[0]] += name in seen
    return found


@functools.cache
def figures() -> dict[str, dict[str, int]]:
    """All that is counted; zeros are left out."""
    found: dict[str, Counter[str]] = {
        "system calls outside io": Counter(),
        "reaches through a hall object": Counter(),
        "callbacks that do nothing": Counter(),
    }
    for path in modules("_node"):
        name, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text())
        if "io" not in path.parts and path.name != PROCESS:
            found["system calls outside io"][name] = system_uses(tree)
            found["reaches through a hall object"][name] = reaches(tree)
        found["callbacks that do nothing"][name] = empty_callbacks(tree)
    return {
        kind: {name: count for name, count in sorted(counts.items()) if count}
        for kind, counts in {**found, "files in circles of imports": in_circles()}.items()
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


def test_files_of_the_node_are_found() -> None:
    """A folder that was renamed would have no figures at all."""
    assert len(modules("_node")) > 90


def test_every_figure_is_written_down() -> None:
    assert figures().keys() == json.loads(WRITTEN.read_text()).keys()


if __name__ == "__main__":
    print({kind: sum(counts.values()) for kind, counts in figures().items()})
    if "--tighten" in sys.argv:
        WRITTEN.write_text(json.dumps(figures(), indent=1) + "\n")
