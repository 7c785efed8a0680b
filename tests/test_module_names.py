"""Modules that strings, comments and pages name exist.

A rename that forgets a name in a string is an error only where the string is used: in a child of
the supervisor, in a run of the simulation, or nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import hoplite_mp

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "hoplite_mp"
DOTTED = re.compile(r"\bhoplite_mp((?:\.\w+)+)")
# A path of a file of the package, from the repository, the package, or one of its packages on.
FILE = re.compile(r"(?<![\w/.-])(?:hoplite_mp/)?(_[a-z]+(?:/\w+)+|integrations(?:/\w+)+)\.py\b")
# Parts of the public API that are still to come.
PLANNED = {"ml", "testing"}
READ = {".py", ".pyi", ".pyx", ".pxi", ".c", ".h", ".md", ".toml", ".json"}

FOLDERS = ("hoplite_mp", "tests", "docs", "benchmarks", "examples", "cext")
EXEMPT = ("docs/_build", "tests/test_module_names.py")
FILES = [
    path
    for path in (
        *ROOT.glob("*.toml"),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*")),
    )
    if path.suffix in READ and not str(path.relative_to(ROOT)).startswith(EXEMPT)
]


def resolves(name: str) -> bool:
    """Whether the dotted name (without the package) begins with a module or a public name."""
    head = name.split(".")[0]
    if head in PLANNED or head in hoplite_mp.__all__ or head.startswith("__"):
        return True
    where = PACKAGE
    for part in name.split("."):
        if (where / part).is_dir():
            where /= part
        else:
            return (
                (where / f"{part}.py").exists()
                or (where / f"{part}.pyi").exists()
                or ((where / "__init__.py").exists() and where != PACKAGE)
            )
    return True


def test_module_names_in_text_exist() -> None:
    missing: dict[str, set[str]] = {}
    for path in FILES:
        text = path.read_text()
        found = {one[0] for one in DOTTED.finditer(text) if not resolves(one[1][1:])}
        found |= {one[0] for one in FILE.finditer(text) if not (PACKAGE / f"{one[1]}.py").exists()}
        if found:
            missing[str(path.relative_to(ROOT))] = found
    assert not missing
