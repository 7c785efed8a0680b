"""The results that the documentation shows: one JSON file, which is committed.

docs/applications.py draws the pictures and tables from this file, also in the tests of the
documentation, where no benchmark results exist. The committed file is the record behind the
page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.applications.report import HEAD, USED, compared, used
from benchmarks.common import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.applications.cases import Application, Picture

__all__ = ["FIGURES", "figures", "write"]

FIGURES = ROOT / "docs" / "applications" / "figures.json"
POINTS_MAX = 200  # of a line


def figures(
    found: dict[str, dict[str, Any]], applications: Iterable[Application]
) -> dict[str, Any]:
    """All of it."""
    tables, pictures = [], []
    for application in applications:
        mine = {case.name: found[case.name] for case in application.cases if case.name in found}
        if mine:
            table = {"head": HEAD, "lines": compared(mine, application.comparisons)}
            drawn = [_drawable(one, mine) for one in application.pictures]
            drawn = [one for one in drawn if one["lines"]]
            more = {"used_head": USED, "used": used(mine), "pictures": [d["name"] for d in drawn]}
            tables.append({"name": application.name} | table | more)
            pictures += drawn
    whens = sorted(result["when"] for result in found.values())
    return {
        "tables": tables,
        "pictures": {one["name"]: one for one in pictures},
        "quick": any(result["quick"] for result in found.values()),
        "measured": [whens[0], whens[-1]] if whens else [],
        "took_s": round(sum(result["took_s"] for result in found.values())),
    }


def _drawable(picture: Picture, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    lines, marks = [], {}
    for name in picture.cases:
        if name in found:
            result = found[name]
            points = picture.points(result)
            step = max(1, len(points) // POINTS_MAX)
            rounded = [(round(x, 2), round(y, 4)) for x, y in points[::step]]
            marks = marks or {word: round(at, 2) for word, at in picture.marks(result).items()}
            lines.append({"label": result["label"], "points": rounded})
    return {"name": picture.name, "title": picture.title, "y": picture.y, "lines": lines,
            "marks": marks}  # fmt: skip


def write(found: dict[str, dict[str, Any]], applications: Iterable[Application]) -> None:
    """Into the documentation's folder."""
    FIGURES.parent.mkdir(exist_ok=True)
    text = json.dumps(figures(found, applications), indent=1, ensure_ascii=False)
    FIGURES.write_text(text + "\n", encoding="utf-8")
