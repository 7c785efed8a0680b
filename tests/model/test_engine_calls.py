"""The protocol of calls that engines commit is safe in every order, and its rules are needed."""

from __future__ import annotations

import pytest

from .engine_calls import RULES, explore

SMALL: frozenset[int] = frozenset()
FIRST, SECOND, BOTH = frozenset({0}), frozenset({1}), frozenset({0, 1})


@pytest.mark.parametrize(
    ("count", "calls", "yields", "large"),
    [
        (2, 2, True, SMALL),
        (2, 3, True, SMALL),
        pytest.param(3, 1, False, SMALL, marks=pytest.mark.soak),
        (2, 2, True, FIRST),
        pytest.param(2, 2, True, SECOND, marks=pytest.mark.soak),
        pytest.param(2, 3, True, BOTH, marks=pytest.mark.soak),
    ],
)
def test_nothing_else_can_happen(
    count: int, calls: int, yields: bool, large: frozenset[int]
) -> None:
    found = explore(count, calls, yields=yields, large=large)
    assert not found.violation, (found.violation, found.trace)
    assert found.states > 10_000


@pytest.mark.parametrize(
    ("rule", "count", "calls", "large"),
    [
        ("freeze", 2, 2, SMALL),
        ("same call", 2, 2, SMALL),
        ("same call", 2, 2, FIRST),
        pytest.param("hand on", 3, 1, SMALL, marks=pytest.mark.soak),
        ("begun", 2, 2, FIRST),
        ("last word", 2, 2, FIRST),
    ],
)
def test_without_a_rule_it_fails(rule: str, count: int, calls: int, large: frozenset[int]) -> None:
    yields = rule in ("same call", "begun", "last word")
    dies = rule not in ("begun", "last word")  # a death would end what hangs
    found = explore(count, calls, rule, yields=yields, large=large, dies=dies)
    assert found.violation, f"{RULES[rule]}, and {found.states} states are all right"
