"""The list of mutants fits the files that it changes; `make mutants` plays them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.aimed import ALL
from tests.mutants.argued import ARGUED
from tests.mutants.play import known_seeds
from tests.mutants.reach import is_run_once, lines_of, marked
from tests.mutants.shipped import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted({one.path for one in MUTANTS}))
def test_mutant_code_occurs_exactly_once(path: str) -> None:
    text = (ROOT / path).read_text()
    for one in (one for one in MUTANTS if one.path == path):
        assert text.count(one.before) == 1, one.name
        changed = text.replace(one.before, one.after)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), one.name


def test_names_are_unique() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 125


@pytest.mark.parametrize("path", sorted({one.path for one in MUTANTS}))
def test_mutant_lines_can_be_marked(path: str) -> None:
    text = (ROOT / path).read_text()
    here = [one for one in MUTANTS if one.path == path]
    program = ast.unparse(marked(text, here))
    for one in here:
        assert repr(one.name) in program, one.name
        compile(program, path, "exec")


def test_mutant_has_a_known_run_or_a_reason() -> None:
    known, names = known_seeds(), {one.name for one in MUTANTS}
    assert names == known.keys() | ARGUED.keys()
    assert not known.keys() & ARGUED.keys()


def test_known_runs_of_mutants_can_be_played() -> None:
    """Whether they still show them is for `make mutants`, which takes minutes."""
    for name, run in known_seeds().items():
        aimed, _, seed = str(run).rpartition(" ")
        assert seed.isdecimal(), name
        assert (aimed in ALL) == (aimed != "") == isinstance(run, str), name


def test_module_level_table_is_marked_once() -> None:
    once = [one.name for one in MUTANTS if is_run_once(one, (ROOT / one.path).read_text())]
    assert once == [
        "management-failed-fetch-is-not-repeated",
        "peer-loss-results-go-before-they-are-held",
        "peer-loss-questions-end-first",
    ]


def test_changed_line_of_a_mutant_is_found() -> None:
    one = MUTANTS[0]
    text = (ROOT / one.path).read_text()
    lines = text.splitlines()
    assert all(lines[at - 1].strip() in one.before for at in lines_of(one, text))
