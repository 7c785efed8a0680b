"""The list of mutants fits the files that it changes; `make mutants` plays them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.shipped import MUTANTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("path", sorted({one.path for one in MUTANTS}))
def test_each_mistake_can_be_made_in_one_place(path: str) -> None:
    text = (ROOT / path).read_text()
    for one in (one for one in MUTANTS if one.path == path):
        assert text.count(one.before) == 1, one.name
        changed = text.replace(one.before, one.after)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)), one.name


def test_names_are_unique() -> None:
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 60
