"""The page of applications shows what was measured, and nothing else."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

if TYPE_CHECKING:
    from types import ModuleType

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "applications"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    return importlib.import_module("applications")


def test_pictures_are_what_the_program_draws(program: ModuleType) -> None:
    there = {path.name: path.read_text() for path in FOLDER.glob("*.svg")}
    assert there == program.PICTURES, "draw them again: python docs/applications.py"
    for text in there.values():
        title = ElementTree.fromstring(text).find("{http://www.w3.org/2000/svg}title")
        assert title is not None
        assert title.text


def test_tables_are_what_was_measured(program: ModuleType) -> None:
    text = program.PAGE.read_text()
    assert text == program.page(text), "write them again: python docs/applications.py"
    assert program.figures()["tables"]


def test_the_page_shows_every_picture(program: ModuleType) -> None:
    shown = re.findall(r"\(applications/([\w-]+\.svg)\)", program.PAGE.read_text())
    assert sorted(shown) == sorted(program.PICTURES)


def test_axes_have_few_and_round_steps(program: ModuleType) -> None:
    assert program.nice(1.0) == 0.2
    assert program.nice(59) == 10
    assert program.nice(7.0) == 2
