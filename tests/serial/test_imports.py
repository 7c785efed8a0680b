"""Which modules readers can import: `_serialize/code.py`."""

from __future__ import annotations

import json
import sys
import types
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._serialize import code

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "made_by_a_test_of_imports"


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = sys.modules[NAME] = types.ModuleType(NAME)
    yield made
    del sys.modules[NAME]


def test_module_without_spec_is_searched_for_once(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched: list[str] = []
    find = code._find

    def counted(name: str) -> Any:
        searched.append(name)
        return find(name)

    monkeypatch.setattr(code, "_find", counted)
    exec("x = 1", module.__dict__)
    assert [code.is_found_by_readers(NAME) for _ in range(5)] == [False] * 5
    assert searched == [NAME]


def test_module_that_the_program_fills_is_searched_for_again(module: types.ModuleType) -> None:
    assert not code.is_found_by_readers(NAME)
    module.__name__ = "json"
    assert not code.is_found_by_readers(NAME)
    module.__spec__ = json.__spec__
    module.__file__ = json.__file__
    assert code.is_found_by_readers("json")
    again = types.ModuleType(NAME)
    again.__file__ = "/nowhere/" + NAME + ".py"
    sys.modules[NAME] = again
    assert not code.is_found_by_readers(NAME)
