"""`python -m benchmarks [--quick] [-k EXPRESSION]`: run the benchmarks, print one table.

Everything found is left in benchmarks/results/latest.json.
"""

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


def table(rows: list[dict[str, Any]]) -> str:
    """Plain text, one line for each row; a title that repeats is not printed again."""
    lines = [("", "ours", "beside it", "", "ratio", "target", "")]
    last = None
    for row in rows:
        wanted, ratio = row["wanted"], row["ratio"]
        amount = row["reference_value"]
        target = ""
        if wanted is not None:
            sign = {"<=": "≤", ">=": "≥", "<": "<"}[row["direction"]]
            target = f"{sign} {number(wanted) if ratio is not None else value(wanted, row['unit'])}"
        same = row["title"] == last
        last = row["title"]
        lines.append(
            (
                "" if same else row["title"],
                "" if same else value(row["ours"], row["unit"]),
                row["reference"],
                "" if amount is None else value(amount, row["unit"]),
                "" if ratio is None else number(ratio),
                target,
                {None: "", True: "met", False: "NOT MET"}[row["met"]],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = (0, 2, 6)
    texts = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([texts[0], "─" * max(map(len, texts)), *texts[1:]])


def value(amount: float, unit: str) -> str:
    """With its unit, and three digits that tell something."""
    if unit != "s":
        return f"{number(amount)} {unit}"
    for factor, name in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(amount) * factor >= 0.9995 or name == "µs":
            return f"{number(amount * factor)} {name}"
    raise AssertionError


def number(amount: float) -> str:
    """Three digits, or all before the point."""
    size = abs(amount)
    if size >= 99.95:
        return f"{amount:,.0f}".replace(",", " ")
    if size >= 9.995:
        return f"{amount:.1f}"
    return f"{amount:.2f}" if size >= 0.0995 or size == 0 else f"{amount:.3f}"


if __name__ == "__main__":
    sys.exit(main())
