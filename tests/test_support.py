"""Test modules share helpers through tests/support, and do not import each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted({*(ROOT / "tests").rglob("*.py")} - {Path(__file__).resolve()})  # it has examples
# A program in a string. One that imports the module that holds it is a part of that module.
IN_TEXT = re.compile(r"^\s*(?:from|import) +(tests[\w.]*)(?: +import +([\w, ]+))?", re.MULTILINE)
BY_NAME = {"import_module", "__import__", "importorskip"}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports(text: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import, wherever it is. `from a import b` may import a or a.b."""
    for one in ast.walk(ast.parse(text)):
        line = getattr(one, "lineno", 0)
        if isinstance(one, ast.Import):
            yield from ((line, alias.name) for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            base = module.split(".")[: -one.level] if one.level else []
            base += one.module.split(".") if one.module else []
            yield from ((line, ".".join([*base, alias.name])) for alias in one.names)
        elif isinstance(one, ast.Call):
            name = getattr(one.func, "attr", getattr(one.func, "id", None))
            if name in BY_NAME and one.args and isinstance(one.args[0], ast.Constant):
                yield line, str(one.args[0].value)
        elif isinstance(one, ast.Constant) and isinstance(one.value, str) and "tests" in one.value:
            for found in IN_TEXT.finditer(one.value):
                if found[1] != module:
                    names = (found[2] or "").split(",")
                    yield from ((line, f"{found[1]}.{name.strip()}") for name in names)


def forbidden(text: str, module: str) -> list[tuple[int, str]]:
    """Imports of test modules and of conftest files of this repository."""
    if "tests" not in text and "from ." not in text:
        return []
    return [
        (line, name)
        for line, name in imports(text, module)
        if name.split(".")[0] == "tests"
        and any(part.startswith("test_") or part == "conftest" for part in name.split(".")[1:])
    ]


def test_no_module_imports_a_test_module() -> None:
    found = {
        str(path.relative_to(ROOT)): forbidden(path.read_text(), module_of(path)) for path in PATHS
    }
    assert not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "text",
    [
        "from tests.node.test_imports import BIG",
        "from tests.node import test_imports as helpers",
        "import tests.node.test_imports",
        "from .test_imports import BIG",
        "from . import test_imports",
        "from ..lan.test_hosts import ended",
        "def f():\n    if x:\n        from tests.node.test_imports import BIG",
        "if TYPE_CHECKING:\n    from tests.node.test_imports import Side",
        "importlib.import_module('tests.node.test_imports')",
        "__import__('tests.node.test_imports')",
        "PROGRAM = '''\n    from tests.node.test_imports import BIG\n'''",
        "PROGRAM = 'import tests.node.test_imports'",
        "from tests.lan.conftest import lan_permitted",
    ],
)
def test_import_of_a_test_module_is_found(text: str) -> None:
    assert len(forbidden(text, "tests.node.test_owners")) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from tests.support.waiting import eventually",
        "from tests.lan import Lan",
        "from hoplite_mp._node import test_mode",
        "importlib.import_module(name)",
        "PROGRAM = 'from tests.node.test_owners import run'",  # the module itself
        "TEXT = 'tests.node.test_imports is a test module'",
    ],
)
def test_other_imports_are_allowed(text: str) -> None:
    assert not forbidden(text, "tests.node.test_owners")


def test_support_modules_have_docstrings_and_no_tests() -> None:
    paths = [path for path in PATHS if path.parent.name == "support"]
    assert len(paths) > 10
    for path in paths:
        tree = ast.parse(path.read_text())
        names = [one.name for one in tree.body if isinstance(one, ast.FunctionDef | ast.ClassDef)]
        assert ast.get_docstring(tree), path.name
        assert not [name for name in names if name.startswith(("test_", "Test"))], path.name
