"""Every golden file is what the planner says today, word for word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.planner_scenarios import run_scenario

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_matches_its_golden_file(path: Path) -> None:
    expected = path.read_text()
    actual = run_scenario(expected)
    if os.environ.get("HOPLITE_MP_REWRITE"):
        path.write_text(actual)
        return
    assert actual == expected


def test_scenarios_exist() -> None:
    assert len(FILES) >= 5
