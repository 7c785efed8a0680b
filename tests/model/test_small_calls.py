"""The protocol of small calls is safe in every order, and its rules are needed for that."""

from __future__ import annotations

import pytest

from .small_calls import RULES, explore


@pytest.mark.parametrize(("count", "calls", "yields"), [(2, 2, True), (2, 3, True), (3, 1, False)])
def test_nothing_else_can_happen(count: int, calls: int, yields: bool) -> None:
    found = explore(count, calls, yields=yields)
    assert not found.violation, (found.violation, found.trace)
    assert found.states > 10_000


@pytest.mark.parametrize(
    ("rule", "count", "calls"), [("freeze", 2, 2), ("same call", 2, 2), ("hand on", 3, 1)]
)
def test_without_a_rule_it_fails(rule: str, count: int, calls: int) -> None:
    found = explore(count, calls, rule, yields=rule == "same call")
    assert found.violation, f"{RULES[rule]}, and {found.states} states are all right"
