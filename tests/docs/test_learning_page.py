"""docs/learning.md shows what the experiments measured, and nothing else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.learning.experiment import experiments

if TYPE_CHECKING:
    from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    return importlib.import_module("learning")


def test_table_shows_the_records(program: ModuleType) -> None:
    text = program.PAGE.read_text("utf-8")
    assert text == program.page(text), "write it again: python docs/learning.py"


def test_figures_show_the_records(program: ModuleType) -> None:
    drawn = {f"{one['name']}.svg": program.figure(one) for one in program.records() if one["lines"]}
    there = {path.name: path.read_text("utf-8") for path in program.FOLDER.glob("*.svg")}
    assert there == drawn, "draw them again: python docs/learning.py"


def test_page_has_a_place_for_every_experiment(program: ModuleType) -> None:
    assert set(program.ORDER) == set(experiments())
