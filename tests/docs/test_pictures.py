"""The pictures of the documentation are what their programs draw."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = DOCS / "pictures"
PROGRAMS = {
    "pictures": ("one_host.svg", "several_hosts.svg", "life_of_a_task.svg"),
    "plans": ("broadcast.svg", "reduction.svg"),
    "imports": ("node_imports.svg",),
}
PAGES = ("how_it_works", "architecture")


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in PROGRAMS for name in PROGRAMS[program]]
)
def test_a_picture_is_what_its_program_draws(
    program: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    drawn = importlib.import_module(program).PICTURES[name]()
    assert drawn == (PICTURES / name).read_text(), f"draw it again: python docs/{program}.py"


def test_every_picture_has_a_program_and_a_page() -> None:
    there = {path.name for path in PICTURES.iterdir()}
    assert there == {name for names in PROGRAMS.values() for name in names}
    pages = "".join((DOCS / f"{page}.md").read_text() for page in PAGES)
    assert [name for name in there if f"(pictures/{name})" not in pages] == []


@pytest.mark.parametrize("path", sorted(PICTURES.iterdir()), ids=lambda path: path.stem)
def test_a_picture_is_well_formed_and_has_a_title(path: Path) -> None:
    picture = ElementTree.parse(path).getroot()
    title = picture.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text


def test_the_page_says_what_the_planner_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers in the text are those of the picture."""
    monkeypatch.setattr(sys, "path", [str(DOCS), *sys.path])
    plans = importlib.import_module("plans")
    played = plans.play(4, (0.0, 0.1, 0.8, 0.2), 3)
    assert played.ended < 0.8
    assert min(block.seconds for block in played.blocks) >= 0.2
    assert {block.receiver for block in played.blocks} == {0, 1, 3}
    assert 2 not in {block.sender for block in played.blocks}
