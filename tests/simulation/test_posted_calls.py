"""Calls that nodes post before their members make them, on real nodes in virtual time."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._node.execution.plan_cells import PlanCells
from hoplite_mp._node.execution.plan_runner import PlanRunner
from hoplite_mp._node.groups.posted_calls import POSTED_MAX, POSTED_S
from hoplite_mp._node.store import budget as stores
from tests.simulation import test_latecomers as latecomers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp._node.execution.plan_state import PlanState
    from hoplite_mp._protocol.group_calls import Plan
    from hoplite_mp._simulation.workloads.workload import Workload

MEMBERS = 3
ITEMS = 40_000
CALLS = 12
KINDS = "allreduce", "broadcast", "allgather", "reduce", "gather", "reduce_scatter", "alltoall"
WARM = 4  # calls before the first that can be posted: one is planned, and two give a pace
PAUSE_S = 0.02  # in which a program computes, so that nodes have time to post


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many plans were posted, placed, and given up, on all nodes."""
    found: Counter[str] = Counter()
    post, drop, place = PlanRunner.post, PlanRunner.drop_posted, PlanCells.place

    def posts(executor: PlanRunner, plan: Plan) -> None:
        post(executor, plan)
        made = executor.executions.get(plan.operation)
        found["posted"] += made is not None and made.posted

    def drops(executor: PlanRunner, plan: Plan) -> None:
        made = executor.executions.get(plan.operation)
        found["given up"] += made is not None and made.posted
        drop(executor, plan)

    def places(cells: PlanCells, execution: PlanState) -> None:
        place(cells, execution)
        found["placed"] += 1
        found["ahead"] += execution.is_ahead

    monkeypatch.setattr(PlanRunner, "post", posts)
    monkeypatch.setattr(PlanRunner, "drop_posted", drops)
    monkeypatch.setattr(PlanCells, "place", places)
    return found


def given(call: int, rank: int, items: int = ITEMS) -> Any:
    return np.arange(items, dtype=np.int64) % 1000 * (rank + 1) + call


def made(g: Any, kind: str, call: int, items: int = ITEMS, dtype: str = "int64") -> None:
    """Makes the call and compares its result with numpy's."""
    all_of_them = [given(call, r, items).astype(dtype) for r in range(g.size)]
    mine = all_of_them[g.rank]
    total = sum(all_of_them)
    if kind == "broadcast":
        right, got = all_of_them[1], g.broadcast(mine if g.rank == 1 else None, root=1)
    elif kind == "alltoall":
        right = [np.array_split(one, g.size)[g.rank] for one in all_of_them]
        got = g.alltoall(np.array_split(mine, g.size))
    elif kind in ("reduce", "gather"):
        got = getattr(g, kind)(mine, root=1)
        right = None if g.rank != 1 else total if kind == "reduce" else all_of_them
    else:
        got = getattr(g, kind)(mine)
        right = {
            "allreduce": total,
            "allgather": all_of_them,
            "reduce_scatter": np.array_split(total, g.size)[g.rank],
        }[kind]
    if right is None or not isinstance(right, list):
        assert np.array_equal(got, right)
    else:
        assert all(np.array_equal(*both) for both in zip(got, right, strict=True))


def play(monkeypatch: pytest.MonkeyPatch, calls: Callable[[Any, int], None]) -> None:
    """Members on hosts of their own, each of which does that with its Group and its rank."""

    def member(rank: int, c: Any) -> None:
        with c.group("posted", MEMBERS, rank) as g:
            calls(g, rank)

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    latecomers.play(monkeypatch, MEMBERS, begin)


@pytest.mark.parametrize("barriers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_calls_at_a_steady_pace_are_posted(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], kind: str, barriers: int
) -> None:
    def calls(g: Any, rank: int) -> None:
        for call in range(CALLS):
            for _ in range(barriers):
                g.barrier()
            made(g, kind, call)
            time.sleep(PAUSE_S)

    play(monkeypatch, calls)
    if kind == "alltoall":  # it gives several pieces
        assert not seen
        return
    assert seen["placed"] >= MEMBERS * (CALLS - WARM)
    assert seen["posted"] == seen["placed"] + seen["given up"]
    assert seen["given up"] == MEMBERS  # the one after the last


def test_what_others_give_arrives_before_a_late_member_calls(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    late_s, took = 0.1, [0.0] * CALLS

    def calls(g: Any, rank: int) -> None:
        for call in range(CALLS):
            g.barrier()
            time.sleep(late_s if rank == 2 else PAUSE_S)
            begun = time.monotonic()
            made(g, "broadcast", call)
            if rank == 2:
                took[call] = time.monotonic() - begun

    play(monkeypatch, calls)
    assert seen["ahead"] >= CALLS - WARM
    transfer_s = 8 * ITEMS / latecomers.RATE
    assert max(took[WARM:]) < 0.5 * transfer_s < transfer_s < took[0]


def test_another_call_than_the_posted_one(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    """Another size, another kind, a small one, one that only one rank knows of."""

    def calls(g: Any, rank: int) -> None:
        for call in range(4 * CALLS):
            turn = call % 7
            time.sleep(PAUSE_S)
            if turn == 5:
                made(g, "allgather", call, 10 if call % 2 else ITEMS)
            elif turn == 6:
                mine = np.ones(ITEMS + 3 * (rank == 1))
                with pytest.raises(ValueError, match="shape"):
                    g.allreduce(mine)
            else:
                made(g, "allreduce", call, ITEMS + 1 * (call % 14 == 4))

    play(monkeypatch, calls)
    assert seen["placed"] > 0
    assert seen["given up"] > 0


def test_blocks_are_given_back_if_the_call_does_not_come(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    def calls(g: Any, rank: int) -> None:
        for call in range(CALLS):
            made(g, "allreduce", call)
            time.sleep(PAUSE_S)
        before = seen["given up"]
        time.sleep(1.5 * POSTED_S)
        assert seen["given up"] == before + MEMBERS or before == MEMBERS
        made(g, "allreduce", CALLS)

    play(monkeypatch, calls)


def test_many_forms_at_once(monkeypatch: pytest.MonkeyPatch, seen: Counter[str]) -> None:
    forms = POSTED_MAX + 2

    def calls(g: Any, rank: int) -> None:
        for call in range(8 * forms):
            made(g, "allreduce", call, ITEMS + 8 * (call % forms))
            time.sleep(PAUSE_S)

    play(monkeypatch, calls)
    assert seen["placed"] > 0


def test_nothing_is_posted_where_there_is_no_time(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    """One call right after the other: what a node prepared would delay the call that is there."""

    def calls(g: Any, rank: int) -> None:
        for call in range(2 * CALLS):
            made(g, "allreduce", call)

    play(monkeypatch, calls)
    assert seen["posted"] <= MEMBERS


@pytest.mark.parametrize("late_s", [0.0, 0.1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["allreduce", "broadcast"])
def test_as_many_elements_of_another_dtype(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], kind: str, dtype: str, late_s: float
) -> None:
    """The members of the other hosts have not called when the leading node's plan arrives, which
    would have to use nothing of what these nodes had prepared."""
    other = CALLS - 3

    def calls(g: Any, rank: int) -> None:
        for call in range(CALLS):
            if call == other:
                time.sleep(late_s * rank)
            made(g, kind, call, dtype=dtype if call == other else "int64")
            time.sleep(PAUSE_S)

    play(monkeypatch, calls)
    assert seen["placed"] > 0


def test_two_forms_that_expect_the_same_call(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    """The second one would hide what was posted for the first one, and nothing is left at the end
    of a run."""

    def calls(g: Any, rank: int) -> None:
        for call in range(16):
            made(g, "allreduce", call, ITEMS if call % 4 else 2 * ITEMS)
            time.sleep(PAUSE_S)
        time.sleep(2 * POSTED_S)

    play(monkeypatch, calls)
    assert seen["posted"] == seen["placed"] + seen["given up"]


@pytest.mark.parametrize("seed", range(8))
def test_any_calls_at_any_pace(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], seed: int
) -> None:
    chance = random.Random(seed)
    every = [(kind, items) for kind in KINDS[:6] for items in (ITEMS, 2 * ITEMS)]
    forms = chance.sample(every, 3)
    program: list[tuple[str, int, str]] = []
    for _ in range(8):
        turn = [(*chance.choice(forms), "int64") for _ in range(chance.choice([1, 1, 2, 3, 4]))]
        program += turn * 4
        program.append(chance.choice([("barrier", 0, ""), ("allreduce", ITEMS, "float32")]))
    naps = [[chance.choice([0, 0, 0, 0.005, 0.03, 0.2]) for _ in program] for _ in range(MEMBERS)]

    def calls(g: Any, rank: int) -> None:
        for call, (kind, items, dtype) in enumerate(program):
            time.sleep(PAUSE_S / 2 + naps[rank][call])
            if kind == "barrier":
                g.barrier()
            else:
                made(g, kind, call, items, dtype)

    play(monkeypatch, calls)
    assert seen["placed"] > 0


@pytest.mark.parametrize("store", [700_000, 1_000_000, 1_500_000, 2_500_000])
@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather"])
def test_a_store_that_is_nearly_full(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], kind: str, store: int
) -> None:
    """Nothing waits for blocks of a call that is only expected."""

    def member(rank: int, c: Any) -> None:
        with c.group("posted", MEMBERS, rank) as g:
            for call in range(CALLS):
                made(g, kind, call, ITEMS // 2)
                if call % 4 == 3:
                    begun = time.monotonic()
                    kept = c.put(np.ones(store // 16))
                    assert time.monotonic() - begun < POSTED_S / 2
                    del kept
                time.sleep(PAUSE_S)

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    latecomers.play(monkeypatch, MEMBERS, begin, store=store)


def test_nothing_is_spilled_where_the_machine_is_short_of_memory(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str]
) -> None:
    """The store has room, but a block would need pages that the machine cannot give."""
    short: list[bool] = []  # whether it is, in the post that is running
    post, spill = PlanRunner.post, stores.Store.spill_one

    def posts(executor: PlanRunner, plan: Plan) -> None:
        available = stores.available_bytes
        short.append(seen["placed"] >= 2 * MEMBERS)
        if short[-1]:
            stores.available_bytes = lambda: 0
        try:
            post(executor, plan)
        finally:
            stores.available_bytes = available
        seen["in vain"] += short.pop() and plan.operation not in executor.executions

    def spills(*about: Any) -> Any:
        seen["spilled"] += bool(short)
        return spill(*about)

    monkeypatch.setattr(PlanRunner, "post", posts)
    monkeypatch.setattr(stores.Store, "spill_one", spills)

    def member(rank: int, c: Any) -> None:
        kept = [c.put(np.ones(50_000)) for _ in range(20)]
        results = []  # so that each call needs fresh pages
        with c.group("posted", MEMBERS, rank) as g:
            for call in range(CALLS):
                results.append(g.broadcast(given(call, 1) if rank == 1 else None, root=1))
                time.sleep(PAUSE_S)
        for call, one in enumerate(results):
            assert np.array_equal(one, given(call, 1))
        del kept

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    latecomers.play(monkeypatch, MEMBERS, begin)
    assert (seen["in vain"] > 0, seen["spilled"]) == (True, 0)


def test_a_trace_shows_only_calls_that_were_made(
    monkeypatch: pytest.MonkeyPatch, seen: Counter[str], tmp_path: Path
) -> None:
    """The nodes give up what they have posted while the trace is on."""
    path = tmp_path / "trace.json"

    def member(rank: int, c: Any) -> None:
        with c.group("posted", MEMBERS, rank) as g:
            for call in range(CALLS):
                made(g, "allreduce", call)
                time.sleep(PAUSE_S)
            if rank == 0:
                with c.trace(path):
                    time.sleep(2 * POSTED_S)
            g.barrier()

    def begin(work: Workload) -> None:
        for rank, host in enumerate(work.hosts()):
            work.program(host, f"rank {rank}", partial(member, rank))

    latecomers.play(monkeypatch, MEMBERS, begin)
    assert seen["given up"] == MEMBERS
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert names
    assert "part of allreduce" not in names
