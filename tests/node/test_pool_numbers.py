"""Numbers of pools are not given to another pool while anything may still name the one before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hoplite_mp._node.tasks.hints import Hints
from hoplite_mp._node.tasks.pools import POOLS_MAX, next_number


def test_they_are_given_out_in_turn() -> None:
    last, found = 0, []
    for _ in range(POOLS_MAX):
        number = next_number(last, {3})
        assert number is not None
        found.append(last := number)
    assert found[:3] == [1, 2, 4]
    assert found.index(1, 1) == POOLS_MAX - 2, "the first one comes again after all others"
    assert next_number(last, set(range(1, POOLS_MAX))) is None


@pytest.mark.parametrize(("pool", "again"), [(0, True), (1, False), (2, False)])
def test_what_is_not_run_again(pool: int, again: bool) -> None:
    """Calls of actors, and tasks of pools that are forgotten."""
    pools: Any = {0: SimpleNamespace(actor=False), 1: SimpleNamespace(actor=True)}
    hints: Any = SimpleNamespace(pools=pools, tasks=SimpleNamespace(pool_of=lambda oid: pool))
    assert Hints.may_run_again(hints, 7) == again
