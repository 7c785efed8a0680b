"""The floors of docs/architecture.md, read from the source as it is.

A module may import from the floors below its own, and from its own folder. Imports inside
functions count; those under `if TYPE_CHECKING` do not, they are never executed.
"""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hoplite_mp"
CEXT = ROOT / "cext"

FLOORS = [
    {"errors", "config", "_version", "_shm", "_tasks", "_reduce", "_engine", "_pages"},
    {"_common"},
    {"_protocol", "_serialize"},
    {"_planner", "_transport"},
    {"_client"},
    {"_supervisor", "_manager", "_node", "_worker", "_group"},
    {"_api"},
    {"_sync"},
    {"integrations", "ml"},
    {"_simulation"},
    {"__main__", "_cli"},
]
FLOOR = {room: number for number, components in enumerate(FLOORS) for room in components}
# Modules of the lowest floor may import each other. Cycles are still refused.
FLAT = {0}
# The arrows drawn inside a floor: `python -m` is the command line.
DRAWN = {("__main__", "_cli")}
# The package itself re-exports the whole face; only who stands at the door may look from there.
FACE = "__init__"

PURE_ROOM = "_planner"
IMPURE = {"time", "socket", "threading", "random", "os", "numpy"}
SIMULATED_WITH = {"_simulation", "_planner", "_protocol", "_common", *FLOORS[0]}
UNSAFE = {"pickle", "cloudpickle", "marshal", "shelve", "asyncio", "threading", "subprocess"}

MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in (PACKAGE, CEXT)
    for path in folder.rglob("*")
    if path.suffix in {".py", ".pyi", ".pyx", ".pxd", ".pxi", ".c", ".h"}
)


def dotted(path: Path) -> str:
    """hoplite_mp/_node/ports.py -> hoplite_mp._node.ports; a package is named like its folder."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """hoplite_mp._node.loop -> _node; the package itself -> __init__."""
    parts = module.split(".")
    return FACE if len(parts) == 1 else parts[1]


KNOWN = {dotted(path) for path in MODULES} | {f"hoplite_mp.{room}" for room in FLOOR}


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def executed(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes, but of `if TYPE_CHECKING` only the else branch."""
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            for other in child.orelse:
                yield other
                yield from executed(other)
        else:
            yield child
            yield from executed(child)


def imports(tree: ast.AST, module: str, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """(line, full name) of every module that the code may import."""
    for node in executed(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if is_package else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in KNOWN else base


@functools.cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    tree = ast.parse(path.read_text(), str(path))
    return list(imports(tree, dotted(path), path.name == "__init__.py"))


def own_imports_of(path: Path) -> list[tuple[int, str]]:
    found = imports_of(path)
    return [(line, name) for line, name in found if name.split(".")[0] == "hoplite_mp"]


def allowed(room: str, other: str) -> bool:
    """Whether a module of `room` may import from `other`."""
    if room == other or (room, other) in DRAWN:
        return True
    if other == FACE:
        return FLOOR[room] == len(FLOORS) - 1
    if FLOOR[room] == FLOOR[other]:
        return FLOOR[room] in FLAT
    return FLOOR[other] < FLOOR[room]


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_imports_point_downwards(path: Path) -> None:
    room = room_of(dotted(path))
    if room == FACE:
        return
    assert room in FLOOR, f"{room} stands on no floor of docs/architecture.md"
    for line, name in own_imports_of(path):
        other = room_of(name)
        assert other == FACE or other in FLOOR, f"{path.name}:{line}: {name} has no floor"
        assert allowed(room, other), f"{path.relative_to(ROOT)}:{line}: {room} imports {name}"


def test_no_import_cycle() -> None:
    """Over modules, the packages' own __init__ left out: they only re-export."""
    paths = {dotted(path): path for path in MODULES if path.name != "__init__.py"}
    graph = {name: {other for _, other in own_imports_of(paths[name])} for name in paths}
    finished: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        assert name not in trail, f"cycle: {' -> '.join([*trail, name])}"
        if name in finished:
            return
        for other in sorted(graph[name] & graph.keys()):
            visit(other, [*trail, name])
        finished.add(name)

    for name in sorted(graph):
        visit(name, [])


def test_the_planner_is_pure() -> None:
    for path in sorted((PACKAGE / PURE_ROOM).rglob("*.py")):
        for line, name in imports_of(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            assert name.split(".")[0] not in IMPURE, f"{where}: the planner imports {name}"


def test_the_simulation_of_many_nodes_plays_without_what_it_imitates() -> None:
    """Its nodes and sockets are its own; planner, messages and rule are the real ones. In
    _simulation/virtual/ nearly all is real."""
    for path in sorted((PACKAGE / "_simulation" / "scale").rglob("*.py")):
        for line, name in own_imports_of(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            assert room_of(name) in SIMULATED_WITH, f"{where}: the simulation imports {name}"


def test_strangers_meet_nothing_that_unpickles_or_runs_by_itself() -> None:
    """What reads bytes before the handshake is through; and loops drive it, not threads."""
    greeted = ("fields", "greetings", "handshake")
    paths = [PACKAGE / "_protocol" / f"{name}.py" for name in greeted]
    for path in [*paths, *sorted((PACKAGE / "_transport").rglob("*.py"))]:
        for line, name in imports_of(path):
            where = f"{path.relative_to(ROOT)}:{line}"
            assert name.split(".")[0] not in UNSAFE, f"{where}: imports {name}"
            assert not name.startswith("hoplite_mp._serialize"), f"{where}: imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=dotted)
def test_each_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path.relative_to(ROOT)}: no docstring"


def test_compiled_rooms_are_leaves() -> None:
    mentions = re.compile(r"^\s*(?:from|import|cimport)\s[^#\n]*\bhoplite_mp\b|^\s*from\s+\.", re.M)
    for path in SOURCES:
        if path.suffix in {".pyx", ".pxd", ".pxi"}:
            found = mentions.search(path.read_text())
            assert found is None, f"{path.name} imports from the package: {found.group()!r}"


# The reader itself, on code whose answer is known.


def names(code: str, module: str = "hoplite_mp._node.loop") -> list[str]:
    return [name for _, name in imports(ast.parse(code), module)]


def test_the_reader_sees_every_form() -> None:
    assert names("import hoplite_mp._common.ids") == ["hoplite_mp._common.ids"]
    assert names("from hoplite_mp._common import ids; from hoplite_mp import Cluster") == [
        "hoplite_mp._common.ids",
        "hoplite_mp",
    ]
    assert names("from ..errors import ClosedError") == ["hoplite_mp.errors"]
    assert names("from .. import errors") == ["hoplite_mp.errors"]
    assert names("from . import other") == ["hoplite_mp._node"]
    assert names("def f():\n    if x:\n        import time") == ["time"]


def test_the_reader_leaves_out_what_is_never_executed() -> None:
    assert names("if TYPE_CHECKING:\n    import time\nelse:\n    import os") == ["os"]
    assert names("import typing\nif typing.TYPE_CHECKING:\n    import time") == ["typing"]


def test_the_rule_itself() -> None:
    assert room_of("hoplite_mp._serialize.code") == "_serialize"
    assert room_of("hoplite_mp._shm") == "_shm"
    assert allowed("config", "errors")
    assert allowed("_node", "_planner")
    assert allowed("_cli", FACE)
    assert not allowed("_node", "_worker")
    assert not allowed("_common", "_planner")
    assert not allowed("_node", "_api")
    assert not allowed("_node", FACE)
