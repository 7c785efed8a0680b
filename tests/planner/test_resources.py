"""Resources of one node: amounts, indices, fractions, whose turn it is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._planner.resources import (
    INDICES_MAX,
    UNITS,
    Demand,
    ResourceLedger,
    WaitingRows,
    amounts_of,
    amounts_text,
    as_amounts,
    demand_words,
    parse_amounts,
)


def test_amounts_are_exact() -> None:
    tenth, third = amounts_of({"gpu": 0.1}), amounts_of({"gpu": 1 / 3})
    assert tenth == (("gpu", 1000),)
    assert amounts_of({"a": 0, "b": 2}) == (("b", 2 * UNITS),)
    one = ResourceLedger(amounts_of({"gpu": 1}))
    assert [one.take(i, tenth) for i in range(11)] == [{"gpu": [0]}] * 10 + [None]
    one = ResourceLedger(amounts_of({"gpu": 1}))
    assert [one.take(i, third) is not None for i in range(4)] == [True, True, True, False]
    assert as_amounts((("a", 5000), ("b", UNITS))) == {"a": 0.5, "b": 1}
    assert demand_words((("a", 5000), ("b", UNITS))) == "a 0.5, b 1"


def test_whole_amounts_are_written_without_a_point() -> None:
    assert amounts_text(amounts_of({"a": 2.0, "b": 0.5})) == "a=2,b=0.5"


def test_waiting_row_is_served_in_order_of_rank() -> None:
    rows = WaitingRows()
    for who, rank in (("a", 3), ("b", 1), ("c", 2)):
        rows.add(who, (), None, rank)
    (row,) = rows.rows.values()
    assert rows.everybody(row) == ["b", "c", "a"]
    rows.remove("c")
    assert rows.everybody(row) == ["b", "a"]


@pytest.mark.parametrize(
    "wrong",
    [{"gpu": -1}, {"gpu": True}, {"gpu": "1"}, {"gpu": b"1"}, {"gpu": memoryview(b"1")},
     {"gpu": float("nan")}, {"gpu": 1e-6}, {"gpu": 1e13},
     {"": 1}, {"a b": 1}, {"a=": 1}, {"a,b": 1}, {"x" * 65: 1}, {1: 1},
     {"gpu": None}, {f"r{i}": 1 for i in range(65)}],
)  # fmt: skip
def test_other_amounts_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="resources"):
        amounts_of(wrong)


def test_amounts_formatted_as_text() -> None:
    assert parse_amounts("gpu=2, disk=0.5") == (("disk", 5000), ("gpu", 2 * UNITS))
    for text in ("gpu", "gpu=", "gpu=x", "=1", "gpu=1,gpu=2", "gpu=-1", "", "gpu=nan"):
        with pytest.raises(ValueError, match="resources"):
            parse_amounts(text)
    amounts = amounts_of({"gpu": 2, "disk": 0.0001, "bytes": 1 << 40})
    assert parse_amounts(amounts_text(amounts)) == amounts


def test_whole_pieces_are_not_shared() -> None:
    ledger = ResourceLedger(amounts_of({"gpu": 2}))
    half, one = amounts_of({"gpu": 0.5}), amounts_of({"gpu": 1})
    assert ledger.take("a", half) == {"gpu": [0]}
    assert ledger.take("b", half) == {"gpu": [0]}  # not on the other one
    assert ledger.take("c", one) == {"gpu": [1]}
    assert ledger.take("d", half) is None
    assert ledger.give_back("b")
    assert not ledger.give_back("b")
    assert ledger.take("d", one) is None  # half of 0 is free, and none of 1
    assert ledger.give_back("c")
    assert ledger.take("d", amounts_of({"gpu": 1.5})) == {"gpu": [0, 1]}
    assert ledger.free() == (("gpu", 0),)


def test_quantities_have_no_indices() -> None:
    for total in (0.5, 12.5, INDICES_MAX + 1):
        ledger = ResourceLedger(amounts_of({"x": total}))
        assert ledger.take(1, amounts_of({"x": total / 2})) == {"x": []}
        assert ledger.times(amounts_of({"x": total / 2}), 9, True) == 1
        assert ledger.times(amounts_of({"x": total / 2}), 9, False) == 2
    assert ResourceLedger().could_ever(())
    assert not ResourceLedger().could_ever(amounts_of({"x": 1}))


AMOUNT = st.sampled_from([1, 1000, 2500, 3333, 5000, 7000, UNITS, 15_000, 2 * UNITS, 3 * UNITS])
DEMAND = st.dictionaries(st.sampled_from("abc"), AMOUNT, min_size=1).map(
    lambda one: tuple(sorted(one.items()))
)


@settings(max_examples=50, deadline=None)
@given(
    st.fixed_dictionaries({"a": st.sampled_from([1, 2, 4]), "b": st.sampled_from([0.7, 2.5, 3])}),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), DEMAND), max_size=60),
)
def test_assigned_amounts_never_exceed_the_total(
    totals: dict[str, float], steps: list[tuple[bool, int, Demand]]
) -> None:
    ledger = ResourceLedger(amounts_of(totals))
    held: dict[int, tuple[Demand, dict[str, list[int]]]] = {}
    for takes, who, demand in steps:
        if takes and who not in held:
            fits = ledger.fits(demand)
            got = ledger.take(who, demand)
            assert (got is not None) == fits
            assert ledger.could_ever(demand) or got is None
            if got is not None:
                assert ledger.assigned(who) == got
                held[who] = demand, got
        else:
            assert ledger.give_back(who) == (held.pop(who, None) is not None)
        for name, total in amounts_of(totals):
            used = sum(dict(demand).get(name, 0) for demand, _ in held.values())
            assert dict(ledger.free())[name] == total - used >= 0
            if total % UNITS:
                assert all(got.get(name, []) == [] for _, got in held.values())
                continue
            on = dict.fromkeys(range(total // UNITS), 0)  # units in use of each index
            for demand, got in held.values():
                units = dict(demand).get(name, 0)
                whole, part = divmod(units, UNITS)
                assert len(got.get(name, [])) == whole + (part > 0)
            shares = [
                (dict(demand)[name] % UNITS, got[name])
                for demand, got in held.values()
                if name in got
            ]
            for part, indices in shares:  # which of its indices is the shared one is its own affair
                for index in indices:
                    on[index] += part if len(indices) == 1 and part else 0
            assert max(on.values()) <= UNITS
            alone = [i for part, indices in shares if not part for i in indices]
            assert len(alone) == len(set(alone))
    for who in list(held):
        ledger.give_back(who)
    assert ledger.is_unused
    assert ledger.free() == amounts_of(totals)
    for demand in {demand for _, _, demand in steps}:  # an empty one takes whatever it could ever
        assert ledger.could_ever(demand) == (ledger.times(demand, 1, True) == 1)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("are"), st.integers(0, 15), st.integers(0, 2), st.integers(-2, 2)
        ),
        max_size=80,
    )
)
def test_waiting_tasks_are_served_in_order(steps: list[tuple[str, int, int, int]]) -> None:
    rows, order = WaitingRows(), 0
    ranks: dict[int, tuple[int, int]] = {}
    for what, who, kind, level in steps:
        if what == "a" and who not in ranks:
            order += 1
            ranks[who] = -level, order
            rows.add(who, (("gpu", kind + 1),), 0, ranks[who])
        elif what == "r":
            rows.remove(who)
            ranks.pop(who, None)
        first = rows.first(())
        assert (first is None) == (not ranks)
        if first is not None:
            best = min(ranks, key=lambda one: ranks[one])
            assert first.members[0] == (ranks[best], best)
            rest = rows.first({first.key})
            assert rest is None or rest.demand != first.demand
        assert all((who in rows) == (who in ranks) for who in range(16))
        everybody = [who for row in rows.rows.values() for who in rows.everybody(row)]
        assert sorted(everybody) == sorted(ranks)
