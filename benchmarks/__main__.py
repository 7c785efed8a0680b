"""`python -m benchmarks [--quick] [-k EXPRESSION]`: run the benchmarks and print one table.

All results are written to benchmarks/results/latest.json."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.report import table

HERE = Path(__file__).resolve().parent
LATEST = HERE / "results" / "latest.json"


def main() -> int:
    """Returns pytest's exit code: a target that is missed is shown, and is no error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("-k", metavar="EXPRESSION", help="only these, as in pytest")
    options = parser.parse_args()
    for needed in ("pytest", "pytest_benchmark", "hoplite_mp"):
        if importlib.util.find_spec(needed) is None:
            print(
                f"python -m benchmarks needs {needed}: pip install -e '.[bench]'", file=sys.stderr
            )
            return 1

    # An installed package has its bytecode, and so have ours and the peers here.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    code, found = run_pytest(options.quick, options.k)
    rows = [
        row for bench in found.get("benchmarks", []) for row in bench["extra_info"].get("rows", [])
    ]
    machine = {
        "cpu": found.get("machine_info", {}).get("cpu", {}).get("brand_raw", platform.machine()),
        "cpus": found.get("machine_info", {}).get("cpu", {}).get("count"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    LATEST.parent.mkdir(exist_ok=True)
    content = {
        "machine": machine,
        "datetime": found.get("datetime"),
        "commit": found.get("commit_info", {}).get("id"),
        "quick": options.quick,
        "rows": rows,
    }
    LATEST.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\n{machine['cpu']}, {machine['cpus']} CPUs, Python {machine['python']}\n")
    print(table(rows))
    print(f"\nwritten: {LATEST}")
    return code


def run_pytest(quick: bool, expression: str | None) -> tuple[int, dict[str, Any]]:
    """The exit code, and what pytest-benchmark has written."""
    import pytest

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "benchmark.json"
        arguments = [str(HERE), "-c", str(HERE / "pytest.ini"), "-q", "-p", "no:cacheprovider"]
        arguments += ["--benchmark-quiet", f"--benchmark-json={path}"]
        if quick:
            arguments.append("--quick")
        if expression is not None:
            arguments += ["-k", expression]
        code = int(pytest.main(arguments))
        text = path.read_text(encoding="utf-8") if path.exists() else ""
    return code, json.loads(text) if text else {}


if __name__ == "__main__":
    sys.exit(main())
