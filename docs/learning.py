"""Draws what the experiments of hoplite_mp.ml measured: `python docs/learning.py`.

The figures and tables of docs/learning.md come from docs/learning/*.json alone; `python -m
benchmarks.learning` writes these files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from applications import drawing, markdown

HERE = Path(__file__).resolve().parent
FOLDER = HERE / "learning"
PAGE = HERE / "learning.md"
BEGIN, END = "<!-- results of learning/*.json -->", "<!-- end of the results -->"
ORDER = (
    "robust", "compression", "cser", "repetition", "ordered", "predict", "group_by", "trees",
    "proactive", "bandit", "gossip", "topologies", "packed", "packed-hosts", "bounded",
)  # fmt: skip


def records() -> list[dict[str, Any]]:
    """What has been measured, in the order of the page."""
    found = [json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda one: (ORDER.index(one["name"]), one["name"]))


def figure(record: dict[str, Any]) -> str:
    """The curves of one experiment."""
    titles = {"title": record["title"], "x": record["x"], "y": record["y"]}
    return drawing(titles | {"marks": {}, "lines": record["lines"]})


def reached(measure: dict[str, Any]) -> str:
    """The target of a measure, and whether it was missed; empty without a target."""
    if measure["target"] is None:
        return ""
    value, target = measure["value"], measure["target"]
    missed = value < target if measure["at_least"] else value > target
    bound = "≥" if measure["at_least"] else "≤"
    return f"{bound} {target:g}{', **missed**' if missed else ''}"


def overview(found: list[dict[str, Any]]) -> str:
    """One row for each experiment: its headline, and where it does not hold."""
    lines = []
    for record in found:
        measures = record["measures"]
        head = next((one for one in measures if one["target"] is not None), measures[0])
        here = f"{head['what']}: {head['value']:.3g} ({head['kind']})"
        limits = record["limits"][0] if record["limits"] else ""
        title = f"[{record['title']}](#{record['name']})"
        lines.append([title, record["source"], here, reached(head), limits])
    names = ["method", "published", "measured here", "to reach", "where it does not hold"]
    return markdown(names, lines)


def section(record: dict[str, Any]) -> str:
    """All measures of an experiment, its figure, its setup, and its limits."""
    name = record["name"]
    lines = [
        [one["what"], f"{one['value']:.3g}", one["kind"], reached(one)]
        for one in record["measures"]
    ]
    parts = [
        f"({name})=\n## {record['title']}",
        f"`python -m benchmarks.learning {name}`, {record['date']}, {record['took_s']} s.",
        markdown(["measure", "value", "kind", "to reach"], lines),
    ]
    if record["lines"]:
        parts.append(f"![{record['title']}](learning/{name}.svg)")
    if record["limits"]:
        parts.append("Where it does not hold:")
        parts.append("\n".join(f"- {limit}" for limit in record["limits"]))
    setup = "; ".join(f"{key}: {shown(value)}" for key, value in record["setup"].items())
    parts.append(f"Setup: {setup}.")
    return "\n\n".join(parts)


def shown(value: Any) -> str:
    """A value of the setup in words."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page(text: str) -> str:
    """docs/learning.md with the results as measured."""
    found = records()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = [overview(found), *map(section, found)]
    return f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}"


def main() -> None:
    for record in records():
        if record["lines"]:
            path = FOLDER / f"{record['name']}.svg"
            path.write_text(figure(record), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
