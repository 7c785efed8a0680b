"""Which seeds reach the lines of a mutant: no other seed can notice it.

A run is the same, to the last event, until the changed line is run for the first time. So all lines
are marked in one pass over many seeds, and each mutant is played with those seeds alone that reach
it: a rare line is played by few.
"""

from __future__ import annotations

import ast
import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests import cores
from tests.mutants.shipped import MUTANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import CodeType, ModuleType

    from tests.mutants.mutant import Mutant

__all__ = ["is_run_once", "lines_of", "marked", "reached"]

ROOT = Path(__file__).resolve().parents[2]
NOTE = "_a_mutant_is_reached_"
_seen: set[str] = set()  # names of mutants, in this seed


def lines_of(mutant: Mutant, text: str) -> list[int]:
    """Numbers of the lines, from 1, of which the first to be run makes a difference."""
    first = text[: text.index(mutant.before)].count("\n") + 1
    lines = mutant.before.splitlines()
    changed, at = [], 0
    for line in difflib.ndiff(lines, mutant.after.splitlines()):
        if line.startswith("- "):
            changed.append(first + at)
        if line.startswith(("- ", "  ")):
            at += 1
    return changed or list(range(first, first + len(lines)))


def is_run_once(mutant: Mutant, text: str) -> bool:
    """Are its lines outside of all functions? Then they are run when the file is loaded, and any
    seed may notice the mistake."""
    functions = [one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.FunctionDef)]
    return not any(
        one.lineno <= line <= (one.end_lineno or 0)
        for one in functions
        for line in lines_of(mutant, text)
    )


def marked(text: str, mutants: Sequence[Mutant]) -> ast.Module:
    """The program of a file, which notes each mutant whose lines are about to be run."""
    tree = ast.parse(text)
    for mutant in mutants:
        for line in lines_of(mutant, text):
            _mark(tree, line, mutant.name)
    return ast.fix_missing_locations(tree)


def _mark(tree: ast.AST, line: int, name: str) -> None:
    """Before the innermost statement that has that line."""
    place: tuple[list[ast.stmt], ast.stmt] | None = None
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            for one in block if isinstance(block, list) else ():
                if one.lineno <= line <= (one.end_lineno or one.lineno):
                    place = block, one  # those further in come later
    if place is None:
        return
    block, statement = place
    call = ast.parse(f"__import__('sys').modules[{NOTE!r}].add({name!r})").body[0]
    ast.copy_location(call, statement)
    block.insert(block.index(statement), call)


class _Loader(importlib.machinery.SourceFileLoader):
    """Of one file whose lines are marked."""

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        path = str(Path(self.path).relative_to(ROOT))
        tree = marked(text, [one for one in MUTANTS if one.path == path])
        return compile(tree, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that have a mutant."""

    _modules = frozenset(one.path.removesuffix(".py").replace("/", ".") for one in MUTANTS)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        loader = _Loader(name, str(ROOT / (name.replace(".", "/") + ".py")))
        return importlib.util.spec_from_file_location(name, loader.path, loader=loader)


def _play(seeds: range) -> dict[int, list[str]]:
    """In a new process: what each of them reaches."""
    from typing import Any, cast

    logging.disable(logging.CRITICAL)
    sys.modules[NOTE] = cast("Any", _seen)
    sys.meta_path.insert(0, _Finder())
    from hoplite_mp._simulation.runs import run_seed

    found = {}
    with cores.on_one_core():
        for seed in seeds:
            _seen.clear()
            failure = run_seed(seed).failure
            if failure:
                print(f"seed {seed} fails without a mutant, and is not played: {failure}")
            else:
                found[seed] = sorted(_seen)
    return found


def reached(seeds: int, processes: int) -> dict[str, list[int]]:
    """Of each mutant the seeds, from 0 on, that reach it."""
    parts = [range(at, seeds, processes) for at in range(processes)]
    found: dict[str, list[int]] = defaultdict(list)
    every: list[int] = []  # that hold without a mistake
    for part in cores.play_all(_play, parts, processes, tasks_max=1):
        every += part
        for seed, names in part.items():
            for name in names:
                found[name].append(seed)
    every.sort()
    everywhere = {one for one in MUTANTS if is_run_once(one, (ROOT / one.path).read_text())}
    return {one.name: every if one in everywhere else sorted(found[one.name]) for one in MUTANTS}
