"""`make seeds`: thousands of runs of real nodes in virtual time, with a ledger for each commit.

A campaign takes an hour, and a machine may have something else to do meanwhile. Each part that has
ended is written down below `.seeds/`, so that this can be stopped and goes on where it was. The
tree must be clean: what is played is the commit.

    python -m tests.seeds [--first N] [--count N] [--processes N] [--show]

Exit code 0: all of them were played, and held.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests import cores

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / ".seeds"
AT_A_TIME = 50
COUNT = 50_000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=COUNT)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", action="store_true", help="what this commit's ledger says")
    arguments = parser.parse_args(argv)
    if output("status", "--porcelain"):
        print("the tree is not clean: commit first", file=sys.stderr)
        return 2
    FOLDER.mkdir(exist_ok=True)
    ledger = FOLDER / f"{output('rev-parse', 'HEAD')}.jsonl"
    lines = ledger.read_text().splitlines() if ledger.exists() else []
    played = {part["first"]: part for part in map(json.loads, lines)}
    wanted = range(arguments.first, arguments.first + arguments.count, AT_A_TIME)
    left = [first for first in wanted if first not in played]
    if not arguments.show:
        begun = time.monotonic()
        for count, part in enumerate(cores.play_all(play, left, arguments.processes), 1):
            played[part["first"]] = part
            with ledger.open("a") as file:
                print(json.dumps(part), file=file)
            for failure in part["failures"]:
                print(f"FAILED  --seed {failure[0]}: {failure[1]}")
            rate = count * AT_A_TIME / (time.monotonic() - begun) * 60
            print(f"{count * AT_A_TIME} of {len(left) * AT_A_TIME}, {rate:.0f} a minute")
        left = []
    found = [played[first] for first in wanted if first in played]
    print(tally(found))
    return 1 if left or any(part["failures"] for part in found) else 0


def output(*words: str) -> str:
    command = ["git", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def play(first: int) -> dict[str, Any]:
    """One part; in a process of its own, which does nothing else."""
    from hoplite_mp._simulation.runs import run_seed

    logging.disable(logging.CRITICAL)
    with cores.on_one_core():
        outcomes = [run_seed(seed) for seed in range(first, first + AT_A_TIME)]
    return {
        "first": first,
        "failures": [(one.seed, one.failure[:300]) for one in outcomes if one.failure],
        "programs": sum(one.programs for one in outcomes),
        "reads": sum(one.reads for one in outcomes),
        "errors": sum(one.errors for one in outcomes),
        "groups": sum(one.groups > 0 for one in outcomes),
        "restarts": sum(one.managers > 0 for one in outcomes),
        "takeovers": sum(one.takeovers > 0 for one in outcomes),
        "faults": Counter(kind for one in outcomes for kind in one.faults),
    }


def tally(parts: list[dict[str, Any]]) -> str:
    """The whole in words."""

    def whole(what: str) -> int:
        return sum(part[what] for part in parts)

    faults: Counter[str] = Counter()
    for part in parts:
        faults.update(part["faults"])
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(faults.items()))
    return (
        f"{len(parts) * AT_A_TIME} seeds, {sum(len(part['failures']) for part in parts)} failed; "
        f"{whole('groups')} with Groups; {whole('takeovers')} in which a standby took over, "
        f"{whole('restarts')} in which a manager's process was started again\n"
        f"{whole('programs')} programs, {whole('reads')} values looked at, "
        f"{whole('errors')} errors that a fault explains\n"
        f"{faults.total()} faults: {kinds}"
    )


if __name__ == "__main__":
    sys.exit(main())
