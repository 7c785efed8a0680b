"""Programs and public names that the documentation has to cover."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import hoplite_mp
from hoplite_mp._api.actor import ActorMethod
from hoplite_mp._client.completions import Completions
from tests.lan import forked

if TYPE_CHECKING:
    from collections.abc import Iterator


ROOT = Path(__file__).resolve().parents[2]
EXAMPLE_ADDRESS = re.compile(r"(?:192\.168\.1\.10|127\.0\.0\.1):7000")


SEPARATE = "<!-- every block is a program -->"
PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    *sorted(
        page
        for page in (ROOT / "docs").rglob("*.md")
        if "_build" not in page.parts and page.stem not in ("security", "changelog")
    ),
]


class Block(NamedTuple):
    """What stands between two fences."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```", text, re.S | re.M)
    return [Block(one[2].strip(), text[: one.start()].count("\n") + 2, one[3]) for one in found]


def needs(block: Block) -> list[str]:
    first = block.text.split("\n", 1)[0]
    return first.removeprefix("# needs:").split() if first.startswith("# needs:") else []


def programs(page: Path) -> list[tuple[str, str]]:
    """Name and source; what is before a block is replaced by empty lines, so that tracebacks name
    the line of the page."""
    made: list[tuple[str, list[str]]] = []
    separate = SEPARATE in page.read_text()
    for block in blocks(page):
        if block.language != "python":
            continue
        compile(block.text, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if any(importlib.util.find_spec(name) is None for name in needs(block)):
            continue
        if separate or not made or needs(block):
            made.append((f"{page.stem}-{block.line}", []))
        lines = made[-1][1]
        lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
    return [(name, "\n".join(lines) + "\n") for name, lines in made]


PROGRAMS = {name: (page, text) for page in PAGES for name, text in programs(page)}


# Calls that the standard library defines, and that only refuse here.
REFUSING = {"set_result", "set_exception", "set_running_or_notify_cancel"}
# What looks after a Future from inside, and methods of iterators that are described with them.
INSIDE = {"unread", "take"}


def public_members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that this library defines."""
    for name in dir(cls):
        if name.startswith("_") or name in REFUSING | INSIDE:
            continue
        found = inspect.getattr_static(cls, name)
        function = getattr(found, "fget", None) or getattr(found, "__func__", found)
        if inspect.isfunction(function) and function.__module__.startswith("hoplite_mp"):
            yield f"{cls.__name__}.{name}", function


def public_names() -> Iterator[tuple[str, Any]]:
    classes: list[type] = [ActorMethod, Completions]
    if importlib.util.find_spec("joblib") is not None:
        from hoplite_mp.integrations.joblib import HopliteBackend, shutdown

        yield "HopliteBackend", HopliteBackend
        yield "integrations.joblib.shutdown", shutdown
    for name in hoplite_mp.__all__:
        found = getattr(hoplite_mp, name)
        yield name, found
        if inspect.isclass(found) and not issubclass(found, BaseException):
            classes.append(found)
    for cls in classes:
        yield from public_members(cls)


PUBLIC = dict(public_names())


def run_file(path: Path, *arguments: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    """Runs a program as `python path arguments` would, forked from a process that has imported
    the library (tests/lan/forked.py). Returns its exit code, stdout and stderr."""
    done = forked.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr
