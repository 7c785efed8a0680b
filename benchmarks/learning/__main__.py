"""`python -m benchmarks.learning [NAME ...]`: runs experiments of hoplite_mp.ml.

Without names all of them run, one after the other. Experiments on emulated hosts need root. Each
result is printed, and written to docs/learning/NAME.json; `python docs/learning.py` draws the
figures and the table of docs/learning.md from these files. With --quick nothing is written.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.learning.experiment import experiments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.learning.experiment import Experiment, Outcome

FOLDER = ROOT / "docs" / "learning"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if an experiment fails; a missed target is printed, and is no failure."""
    known = experiments()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    parser.add_argument("--quick", action="store_true", help="small and short; nothing is written")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no experiment {unknown[0]!r}: there are {', '.join(known)}")
    failed = 0
    for name in options.names or known:
        begun = time.monotonic()
        print(f"== {name}: {known[name].title}", flush=True)
        try:
            outcome = known[name].run(options.quick)
        except Exception as error:  # the others still run
            print(f"{name} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        seconds = time.monotonic() - begun
        print(text(outcome, seconds), flush=True)
        if not options.quick:
            write(known[name], outcome, seconds)
    return 1 if failed else 0


def text(outcome: Outcome, seconds: float) -> str:
    """The measures with their targets, the setup, and the limits of the effect."""
    lines = []
    for one in outcome.measures:
        bound = "≥" if one.at_least else "≤"
        target = "" if one.target is None else f"  (to reach: {bound} {one.target:g})"
        missed = "  MISSED" if one.reached is False else ""
        lines.append(f"  {one.what}: {one.value:.4g} [{one.kind}]{target}{missed}")
    lines.append("  setup: " + ", ".join(f"{key} {value}" for key, value in outcome.setup.items()))
    lines += [f"  where it does not hold: {limit}" for limit in outcome.limits]
    lines.append(f"  took {seconds:.0f} s")
    return "\n".join(lines)


def write(experiment: Experiment, outcome: Outcome, seconds: float) -> None:
    """The record from which the documentation is made."""
    FOLDER.mkdir(exist_ok=True)
    record = {
        "name": experiment.name,
        "title": experiment.title,
        "source": experiment.source,
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "took_s": round(seconds),
        **dataclasses.asdict(outcome),
    }
    path = FOLDER / f"{experiment.name}.json"
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
