"""`python -m benchmarks.applications [-k PATTERN] [-n 8] [--quick]`: whole applications.

Needs root, `make engines`, and Debian's dataset-fashion-mnist. Each case starts one system on
emulated hosts of 1 Gbit/s, runs one program of examples/applications/, and writes the results to
benchmarks/results/applications/CASE.json (with --quick to .../quick). Cases with a result are not
run again, so an interrupted run can be continued; --again repeats all measurements. Then the table
of all results is printed. --report only prints the table; with --publish it also replaces the data
of the documentation (then run: python docs/applications.py)."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from benchmarks.applications import (
    ensemble,
    faults,
    publish,
    reinforcement,
    report,
    sgd,
    training,
)
from benchmarks.applications.beds import Bed
from benchmarks.applications.cases import NAMES
from benchmarks.applications.running import run
from benchmarks.common import ROOT
from benchmarks.lan.hosts import link_rate
from examples.applications import fashion_mnist
from tests.lan import why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.applications.cases import Case

APPLICATIONS = (
    sgd.APPLICATION,
    reinforcement.APPLICATION,
    ensemble.APPLICATION,
    training.APPLICATION,
    faults.APPLICATION,
)
FOLDER = ROOT / "benchmarks" / "results" / "applications"
TRIES = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1: some case has found no result; it is tried again by the same command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.applications", description=__doc__)
    parser.add_argument("-k", default="", metavar="PATTERN", help="only cases whose names match")
    parser.add_argument("-n", type=int, help="only cases of so many hosts")
    parser.add_argument("--size", type=float, help="only cases of so many MB")
    parser.add_argument("--quick", action="store_true", help="short runs, to try it out")
    parser.add_argument("--again", action="store_true", help="also what has been measured")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument(
        "--publish", action="store_true", help="into docs/applications/, from which pages are made"
    )
    parser.add_argument("--list", action="store_true", help="the names of the cases")
    options = parser.parse_args(arguments)
    cases = [
        case
        for application in APPLICATIONS
        for case in application.cases
        if re.search(options.k, case.name)
        and options.n in (None, case.hosts)
        and options.size in (None, case.size)
    ]
    if options.list:
        print(*(case.name for case in cases), sep="\n")
        return 0
    # Ends as by Ctrl-C does: no host, and no folder of one, stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = FOLDER / "quick" if options.quick else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    failed = [] if options.report else measure(cases, folder, options.quick, options.again)
    found = report.results(folder)
    print(report.printed(found, APPLICATIONS))
    if options.publish:
        publish.write(found, APPLICATIONS)
    for name in failed:
        print(f"NO RESULT: {name}; its logs are in {folder / name}.failed")
    return 1 if failed else 0


def measure(cases: Sequence[Case], folder: Any, quick: bool, again: bool) -> list[str]:
    """The names of those that have failed."""
    why = why_not()
    if why is None and not fashion_mnist.FOLDER.exists():
        why = f"there is no {fashion_mnist.FOLDER}: apt install dataset-fashion-mnist"
    if why is not None:
        raise SystemExit(why)
    failed = []
    for number, case in enumerate(cases, 1):
        path = folder / f"{case.name}.json"
        if path.exists() and not again:
            continue
        print(f"{time.strftime('%H:%M:%S')} {number}/{len(cases)} {case.name}", flush=True)
        for _ in range(TRIES):
            try:
                result = one(case, quick)
            except Exception:
                (folder / f"{case.name}.failed").write_text(traceback.format_exc())
                print("   no result", flush=True)
                continue
            part = path.with_suffix(".part")
            part.write_text(json.dumps(result))
            part.rename(path)
            (folder / f"{case.name}.failed").unlink(missing_ok=True)
            break
        else:
            failed.append(case.name)
    return failed


def one(case: Case, quick: bool) -> dict[str, Any]:
    """Measures it on hosts of its own."""
    given = case.arguments | (case.quick if quick else {})
    began = time.monotonic()
    with Bed(case.system, case.hosts, memory=case.memory, tls=case.tls, env=case.env) as bed:
        rate = link_rate(bed.lan[0], bed.lan[1], 16 << 20)
        found = run(bed, case.module, given, case.patience_s, case.incidents, case.everywhere)
    kept = {
        key: value
        for key, value in dataclasses.asdict(case).items()
        if key not in ("incidents", "quick")
    }
    return kept | found | {
        "arguments": given,
        "label": case.label or NAMES[case.system],
        "link_bytes_per_s": rate,
        "quick": quick,
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "took_s": time.monotonic() - began,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
