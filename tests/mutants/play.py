"""`make mutants`: each mistake of `shipped.py` is made, and the simulation has to see it.

Why it exists: thousands of green seeds say little if they would be green without the line that
keeps a promise. Each mutant is played in a process of its own, in which its file is loaded with the
changed text, with the seeds that reach its lines (`reach.py`), until one fails, or there were
enough. What was found is written down below
`.mutants/` for each commit, so that this can be stopped and goes on where it was.

    python -m tests.mutants.play [NAME ...] [--seeds N] [--processes N] [--again]

Exit code 0: every mutant was seen.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tests import cores
from tests.mutants.reach import reached
from tests.mutants.shipped import MUTANTS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutants"
SEEDS = 2_000


class Loader(importlib.machinery.SourceFileLoader):
    """Of one file with a mistake in it."""

    def __init__(self, name: str, mutant: Mutant) -> None:
        super().__init__(name, str(ROOT / mutant.path))
        self._mutant = mutant

    def get_data(self, path: str) -> bytes:
        data = super().get_data(path)
        if not path.endswith(".py"):
            raise OSError("the bytecode is that of the file without the mistake")
        before, after = self._mutant.before.encode(), self._mutant.after.encode()
        assert data.count(before) == 1, f"{self._mutant.name}: the file has changed"
        return data.replace(before, after)

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """No bytecode of this is kept."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds the module with the mistake before anybody else does."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._module = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._module:
            return None
        loader = Loader(name, self._mutant)
        return importlib.util.spec_from_file_location(name, loader.path, loader=loader)


def play(about: tuple[Mutant, list[int]]) -> dict[str, object]:
    """In a new process: the seed at which something was seen, and what; or which were tried."""
    mutant, seeds = about
    logging.disable(logging.CRITICAL)
    sys.meta_path.insert(0, Finder(mutant))
    from hoplite_mp.simulation.cluster.runs import run_seed

    with cores.on_one_core():
        for seed in seeds:
            failure = run_seed(seed).failure
            if failure:
                return {"name": mutant.name, "seed": seed, "seen": failure[:200]}
    return {"name": mutant.name, "tried": len(seeds), "seen": ""}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    arguments = parser.parse_args(argv)
    FOLDER.mkdir(exist_ok=True)
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    ledger = FOLDER / f"{commit}.jsonl"
    if arguments.again:
        ledger.unlink(missing_ok=True)
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    found = {one["name"]: one for one in map(json.loads, lines)}
    wanted = [one for one in MUTANTS if one.name in (arguments.names or [one.name])]
    seeds = _reached(FOLDER / f"{commit}-{arguments.seeds}.json", arguments)
    left = [(one, seeds[one.name]) for one in wanted if one.name not in found]
    left.sort(key=lambda pair: len(pair[1]))
    for one in cores.play_all(play, left, arguments.processes, tasks_max=1):
        found[str(one["name"])] = one
        with ledger.open("a") as file:
            print(json.dumps(one), file=file)
        told = f"seed {one['seed']}: {one['seen']}" if one["seen"] else "NOT SEEN"
        print(f"{one['name']} ({len(seeds[str(one['name'])])} reach it): {told}", flush=True)
    missed = [one for one in wanted if not found[one.name]["seen"]]
    for one in missed:
        print(f"NOT SEEN  {one.name} ({one.path}): {one.promise}")
    print(f"{len(wanted) - len(missed)} of {len(wanted)} mutants were seen")
    return 1 if missed else 0


def _reached(path: Path, arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Kept from before, or found out now."""
    if not path.exists():
        path.write_text(json.dumps(reached(arguments.seeds, arguments.processes)))
    found: dict[str, list[int]] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
