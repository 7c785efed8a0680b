"""`make mutants`: each mistake of `shipped.py` is made, and the simulation has to see it.

Thousands of green seeds say little if they would be green without the line that keeps a promise.
Each mutant is played in a process of its own, in which its file is loaded with the changed text.
The seed that has shown it before (`seen.json`) is played first, with and without the mistake. If
that does not show it any more, because programs or faults are drawn in another way, other seeds of
an aimed run are played, and then the seeds that reach its lines (`reach.py`), until one fails, or
there were enough. What was found is
written down below `.mutants/` for each commit, so that this can be stopped and goes on where it
was. Mutants that no program can notice have their reason in `argued.py`.

    python -m tests.mutants.play [NAME ...] [--known] [--write] [--seeds N] [--again]

--known: plays nothing but the seeds of seen.json. --write: writes the seeds that were found there.
Exit code 0: every mutant was seen, or has a reason.
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
from typing import TYPE_CHECKING, TypeAlias

from tests import cores
from tests.mutants.argued import ARGUED
from tests.mutants.reach import reached
from tests.mutants.shipped import MUTANTS

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from types import ModuleType

    from tests.mutants.mutant import Mutant

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".mutants"
SEEN = Path(__file__).with_name("seen.json")
SEEDS = 2_000
AIMED_SEEDS = 16  # of an aimed run that was known, before other seeds
Run: TypeAlias = "int | str"  # a seed, or an aimed run


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


def failure_of(run: Run) -> str:
    """Plays a seed, or an aimed run ("name seed", tests/aimed)."""
    from hoplite_mp._simulation.runs import run_seed

    if isinstance(run, int):
        return run_seed(run).failure
    from tests.aimed import run_aimed

    name, seed = run.split()
    return run_aimed(name, int(seed)).failure


def play(about: tuple[Mutant, Sequence[Run]]) -> dict[str, object]:
    """In a new process: the run in which something was seen, and what; or how many were tried."""
    mutant, seeds = about
    logging.disable(logging.CRITICAL)
    sys.meta_path.insert(0, Finder(mutant))
    with cores.on_one_core():
        for seed in seeds:
            failure = failure_of(seed)
            if failure:
                return {"name": mutant.name, "seed": seed, "seen": failure[:200]}
    return {"name": mutant.name, "tried": len(seeds), "seen": ""}


def holds(seeds: list[Run]) -> list[Run]:
    """In a new process: those of the runs that hold without a mistake."""
    logging.disable(logging.CRITICAL)
    with cores.on_one_core():
        return [seed for seed in seeds if not failure_of(seed)]


def known_seeds() -> dict[str, Run]:
    """Of each mutant that was seen: the run that has shown it."""
    known: dict[str, Run] = json.loads(SEEN.read_text())
    return known


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--known", action="store_true", help="only the seeds of seen.json")
    parser.add_argument("--write", action="store_true", help="write what was found to seen.json")
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

    def look(left: Sequence[tuple[Mutant, Sequence[Run]]], final: bool) -> None:
        """Plays these. final: also what was not seen is written down."""
        for one in cores.play_all(play, left, arguments.processes, tasks_max=1):
            name = str(one["name"])
            if one["seen"] or final:
                found[name] = one
                with ledger.open("a") as file:
                    print(json.dumps(one), file=file)
            told = f"seed {one['seed']}: {one['seen']}" if one["seen"] else "NOT SEEN"
            print(f"{name}: {told}", flush=True)

    def look_at(runs: dict[str, list[Run]]) -> None:
        """Plays those of the runs of each mutant that hold without it."""
        played = sorted({run for some in runs.values() for run in some}, key=str)
        parts = [played[at :: arguments.processes] for at in range(arguments.processes)]
        sound = {run for part in cores.play_all(holds, parts, arguments.processes) for run in part}
        left = [one for one in wanted if one.name not in found and one.name in runs]
        pairs = [(one, [run for run in runs[one.name] if run in sound]) for one in left]
        look([pair for pair in pairs if pair[1]], final=False)

    known = known_seeds()
    look_at({name: [run] for name, run in known.items() if _is_open(name, wanted, found)})
    if not arguments.known:
        look_at({name: _aimed(run) for name, run in known.items() if _is_open(name, wanted, found)})
    left = [one for one in wanted if one.name not in found and one.name not in ARGUED]
    if left and not arguments.known:
        seeds = _reached(FOLDER / f"{commit}-{arguments.seeds}.json", arguments)
        look(sorted(((one, seeds[one.name]) for one in left), key=lambda p: len(p[1])), final=True)
    seen = {name: one["seed"] for name, one in found.items() if one["seen"]}
    if arguments.write:
        SEEN.write_text(json.dumps(dict(sorted({**known, **seen}.items())), indent=1) + "\n")
    missed = [one for one in wanted if one.name not in seen]
    for one in missed:
        told = f"NOT SEEN  {one.name} ({one.path}): {one.promise}"
        print(f"ARGUED    {one.name}: {ARGUED[one.name]}" if one.name in ARGUED else told)
    argued = [one for one in missed if one.name in ARGUED]
    print(
        f"{len(wanted) - len(missed)} of {len(wanted)} mutants were seen, "
        f"{len(argued)} are argued, {len(missed) - len(argued)} are open"
    )
    return 1 if len(missed) > len(argued) else 0


def _is_open(name: str, wanted: Sequence[Mutant], found: Collection[str]) -> bool:
    """Is it to be played, and was not seen yet?"""
    return name not in found and any(one.name == name for one in wanted)


def _aimed(run: Run) -> list[Run]:
    """Other seeds of an aimed run."""
    if isinstance(run, int):
        return []
    name = run.split()[0]
    return [one for seed in range(AIMED_SEEDS) if (one := f"{name} {seed}") != run]


def _reached(path: Path, arguments: argparse.Namespace) -> dict[str, list[int]]:
    """Kept from before, or found out now."""
    if not path.exists():
        path.write_text(json.dumps(reached(arguments.seeds, arguments.processes)))
    found: dict[str, list[int]] = json.loads(path.read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
