"""The tables alone: random programs against what they promise, deaths among them."""

from __future__ import annotations

import queue
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._sync import sync_actors
from hoplite_mp._sync.waiting import (
    CallAnswer,
    Gathering,
    Item,
    Notifications,
    Permits,
    QueueTable,
    Recursive,
)

PROCESSES = [b"a", b"b", b"c"]
WHO = st.sampled_from(PROCESSES)


@given(st.integers(0, 3), st.lists(st.sampled_from(["put", "get", "done", "size"]), max_size=60))
@settings(deadline=None)
def test_without_waiting_it_is_a_queue_of_the_standard_library(size: int, steps: list[str]) -> None:
    model: queue.Queue[int] = queue.Queue(size)
    table = QueueTable(size)
    for number, step in enumerate(steps):
        if step == "put":
            full = table.put((b"a", number), number, False) is CallAnswer.REFUSED
            assert full == model.full()
            if not full:
                model.put_nowait(number)
        elif step == "get":
            found = table.take((b"a", number), False)
            if isinstance(found, Item):
                assert found.value == model.get_nowait()
            else:
                assert model.empty()
        elif step == "done":
            allowed = model.unfinished_tasks > 0
            assert table.finish_one(b"a") == allowed
            if allowed:
                model.task_done()
        assert len(table.items) == model.qsize()
        assert table.unfinished == model.unfinished_tasks
        assert (table.join() is CallAnswer.DONE) == (model.unfinished_tasks == 0)


@given(st.integers(0, 3), st.lists(st.booleans(), max_size=40))
@settings(deadline=None)
def test_without_waiting_it_is_a_semaphore_of_the_standard_library(
    value: int, steps: list[bool]
) -> None:
    model, table = threading.Semaphore(value), Permits(value, False)
    for number, acquires in enumerate(steps):
        if acquires:
            got = table.acquire((b"a", number), False) is CallAnswer.DONE
            assert got == model.acquire(blocking=False)
        else:
            assert table.release(b"b")
            model.release()


QUEUE_STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "take", "take", "come", "stop", "give back", "die", "end"]),
        WHO,
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=80,
)


class QueueRun:
    """A program on a queue's table, and what its callers have seen."""

    def __init__(self, size: int) -> None:
        self.table = QueueTable(size)
        self.size = size
        self.put: list[int] = []  # values that are in, or were, in their order
        self.out: Counter[int] = Counter()  # what callers have, or had when they died
        self.last: dict[bytes, Item] = {}
        self.dead: set[bytes] = set()
        self.waiting_put: dict[tuple[bytes, int], int] = {}
        self.waiting_get: dict[tuple[bytes, int], bool] = {}  # has it been woken
        self.order: list[int] = []
        self.gave_back = False
        self.number = 0

    def step(self, kind: str, who: bytes, pick: int, waits: bool) -> None:
        self.number += 1
        ticket = (who, self.number)
        if kind == "die":
            self.die(who)
        elif who in self.dead:
            return
        elif kind == "put":
            answer = self.table.put(ticket, self.number, waits)
            if answer is CallAnswer.DONE:
                self.put.append(self.number)
            elif answer is CallAnswer.WAIT:
                self.waiting_put[ticket] = self.number
        elif kind == "take":
            self.take(ticket, waits)
        elif kind == "come":
            called = [one for one, woken in self.waiting_get.items() if woken and one[0] == who]
            if called:
                self.take(called[pick % len(called)], waits)
        elif kind == "stop":
            mine = [one for one in self.waiting_get if one[0] == who]
            if mine:
                one = mine[pick % len(mine)]
                self.table.stop_taking(one)
                del self.waiting_get[one]
            mine = [one for one in self.waiting_put if one[0] == who]
            if mine:
                one = mine[pick % len(mine)]
                assert self.table.stop_putting(one) is CallAnswer.REFUSED
                del self.waiting_put[one]
        elif kind == "give back" and who in self.last:
            item = self.last.pop(who)
            self.out[item.value] -= 1
            self.gave_back = True
            self.table.give_back(who, item)
        elif kind == "end" and pick == 0:
            self.table.end(False)
            for one in self.waiting_put:  # whose time is over before they have heard of it
                assert self.table.stop_putting(one) is CallAnswer.ENDED
        self.wake()
        self.check()

    def take(self, ticket: tuple[bytes, int], waits: bool) -> None:
        called = self.waiting_get.get(ticket, False)
        found = self.table.take(ticket, waits)
        if isinstance(found, Item):
            self.waiting_get.pop(ticket, None)
            self.out[found.value] += 1
            self.order.append(found.value)
            self.last[ticket[0]] = found
        elif found is CallAnswer.WAIT:
            assert waits
            assert not called, "who was woken finds an item"
            self.waiting_get[ticket] = False
        else:
            assert not called or self.table.ended
            self.waiting_get.pop(ticket, None)

    def die(self, who: bytes) -> None:
        self.table.died(who)
        self.dead.add(who)
        self.last.pop(who, None)
        for waiting in (self.waiting_get, self.waiting_put):
            for ticket in [one for one in waiting if one[0] == who]:
                del waiting[ticket]  # type: ignore[attr-defined]

    def wake(self) -> None:
        woken, self.table.woken = self.table.woken, []
        for ticket, answer in woken:
            assert ticket[0] not in self.dead
            if ticket in self.waiting_put:
                value = self.waiting_put.pop(ticket)
                if answer is CallAnswer.DONE:
                    self.put.append(value)
            else:
                assert not self.waiting_get[ticket], "woken twice"
                self.waiting_get[ticket] = True

    def check(self) -> None:
        table = self.table
        there = [item.value for item in table.items]
        assert sorted([*there, *self.out.elements()]) == sorted(self.put), "lost, or doubled"
        if not self.gave_back:
            assert self.order + there == self.put, "not first in, first out"
            assert not self.size or len(there) <= self.size
        assert there == sorted(there, key=self.put.index)
        assert len(table.called) <= len(there), "woken for nothing"
        woken = {ticket for ticket, called in self.waiting_get.items() if called}
        assert table.called <= woken, "an item is set aside for nobody"
        assert table.ended or table.called == woken, "who was woken finds none"
        if table.getters:
            assert len(there) == len(table.called), "one waits, and an item is there"
        if table.putters:
            assert len(there) >= self.size, "one waits, and there is room"
        assert table.lost <= table.unfinished


@given(st.integers(0, 2), QUEUE_STEPS)
@settings(deadline=None, max_examples=80)
def test_a_queue_loses_nothing(size: int, steps: list[tuple[str, bytes, int, bool]]) -> None:
    run = QueueRun(size)
    for step in steps:
        run.step(*step)


@given(
    st.integers(0, 3),
    st.booleans(),
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "acquire", "release", "stop", "leave", "die"]),
            WHO,
            st.booleans(),
        ),
        max_size=80,
    ),
)
@settings(deadline=None, max_examples=80)
def test_permits_are_neither_lost_nor_made(
    free: int, bounded: bool, steps: list[tuple[str, bytes, bool]]
) -> None:
    table = Permits(free, bounded)
    total = free
    granted: dict[tuple[bytes, int], bool] = {}  # waits (False) or has one
    dead: set[bytes] = set()
    for number, (kind, who, waits) in enumerate(steps):
        ticket = (who, number)
        mine = [one for one, has in granted.items() if one[0] == who and not has]
        if kind == "die":
            table.died(who)
            dead.add(who)
            granted = {one: has for one, has in granted.items() if one[0] != who}
        elif who in dead:
            continue
        elif kind == "acquire":
            answer = table.acquire(ticket, waits)
            if answer is not CallAnswer.REFUSED:
                granted[ticket] = answer is CallAnswer.DONE
        elif kind == "release":
            held = any(table.held.values())
            assert table.release(who) == (held or not bounded)
            total += not held and not bounded
        elif mine and kind == "stop":
            assert table.stop_waiting(mine[0], True) is CallAnswer.REFUSED
            del granted[mine[0]]
        elif kind == "leave":
            has = [one for one in table.held.get(who, ())]
            if has:
                assert table.stop_waiting(has[0], False) is CallAnswer.DONE
        for one, _ in table.woken:
            assert granted[one] is False
            granted[one] = True
        table.woken.clear()
        assert table.free + sum(map(len, table.held.values())) == total
        assert not (table.free and table.waiting), "one waits, and there is a permit"
        assert list(table.waiting) == [one for one, got in granted.items() if not got], "not fair"
        assert not dead & table.held.keys()


def test_what_was_set_aside_is_the_next_ones() -> None:
    """Who was woken for it has died, or has given up."""
    for gives_up in (lambda table: table.died(b"a"), lambda table: table.stop_taking((b"a", 1))):
        table = QueueTable(0)
        assert table.take((b"a", 1), True) is CallAnswer.WAIT
        table.put((b"b", 1), "item", False)
        assert table.take((b"b", 2), False) is CallAnswer.REFUSED
        gives_up(table)
        assert table.take((b"b", 3), False) == Item(1, "item")


def test_a_putter_whose_time_ends_with_the_queue_learns_that() -> None:
    """Its time is over before it has heard that the queue was shut down: the value is not there."""
    table = QueueTable(1)
    table.put((b"a", 1), "first", True)
    assert table.put((b"a", 2), "second", True) is CallAnswer.WAIT
    assert table.put((b"b", 1), "third", True) is CallAnswer.WAIT
    table.end(False)
    assert table.stop_putting((b"a", 2)) is CallAnswer.ENDED
    table.died(b"b")
    assert not table.turned_away
    assert [item.value for item in table.items] == ["first"]


def test_a_death_that_is_told_during_a_call_that_fails_is_not_overlooked() -> None:
    """The thread that is told it finds the table taken, and leaves it to the one that has it."""
    lock = sync_actors.LockActor.__new__(sync_actors.LockActor)
    lock._table = Permits(1, True)
    lock._promises, lock._lives = {}, {b"holder": ObjectRef(bytes(16), None)}
    lock._lock, lock._deaths = threading.Lock(), queue.SimpleQueue()
    assert lock.acquire((b"holder", 1), False)[0] == CallAnswer.DONE

    def call() -> None:
        with lock._alone():
            lock._deaths.put(b"holder")
            lock._look()
            assert lock.value() == 0
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        call()
    assert lock.value() == 1


def test_an_item_that_another_process_has_finished_is_not_lost_with_its_taker() -> None:
    table = QueueTable(0)
    table.put((b"a", 1), 1, False)
    assert isinstance(table.take((b"b", 2), False), Item)
    assert table.finish_one(b"c")  # b has handed the item over
    assert table.join() is CallAnswer.DONE
    table.put((b"a", 3), 2, False)
    table.died(b"b")
    assert table.join() is CallAnswer.WAIT
    assert isinstance(table.take((b"c", 4), False), Item)
    assert table.join() is CallAnswer.WAIT
    assert table.finish_one(b"c")
    assert table.join() is CallAnswer.DONE


def test_an_item_given_back_after_the_others_were_dropped_is_dropped() -> None:
    table = QueueTable(0)
    table.put((b"a", 1), 1, False)
    item = table.take((b"b", 2), False)
    assert isinstance(item, Item)
    table.end(True)
    table.give_back(b"b", item)
    assert not table.items
    assert table.take((b"b", 3), False) is CallAnswer.ENDED
    assert table.join() is CallAnswer.DONE


def test_of_several_takers_none_is_forgotten_for_another() -> None:
    """Which of them has handed its item over is not known; `join` must not wait for a dead one."""
    table = QueueTable(0)
    for number, process in enumerate((b"d", b"b")):
        table.put((b"a", number), number, False)
        assert isinstance(table.take((process, number), False), Item)
    assert table.finish_one(b"c")
    table.died(b"d")
    assert table.join() is CallAnswer.REFUSED


def test_dropping_items_that_were_finished_early() -> None:
    table = QueueTable(0)
    table.put((b"a", 1), 1, False)
    assert table.finish_one(b"a")
    table.end(True)
    assert table.unfinished == 0
    assert table.join() is CallAnswer.DONE


@given(st.lists(st.tuples(st.sampled_from(["acquire", "release", "all", "stop", "die"]), WHO,
                          st.integers(1, 2)), max_size=60))  # fmt: skip
@settings(deadline=None)
def test_a_recursive_lock_has_one_owner_and_wakes_the_first_that_waits(
    steps: list[tuple[str, bytes, int]],
) -> None:
    table, owner, depth = Recursive(), None, 0
    waiting: list[tuple[tuple[bytes, int], int]] = []
    for turn, (step, process, number) in enumerate(steps):
        me = process, number
        if step == "acquire":
            free = owner == me or (owner is None and not waiting)
            answer = table.acquire((process, turn), True, number)
            assert (answer is CallAnswer.DONE) == free
            if free:
                owner, depth = me, depth + 1
            else:
                waiting.append(((process, turn), number))
        elif step == "release":
            assert table.release(process, number) == (owner == me)
            depth -= owner == me
        elif step == "all":
            assert table.release_all(process, number) == (depth if owner == me else 0)
            depth = 0 if owner == me else depth
        elif step == "stop" and waiting:
            assert table.stop_waiting(waiting.pop()[0], True) is CallAnswer.REFUSED
        elif step == "die":
            table.died(process)
            waiting = [one for one in waiting if one[0][0] != process]
            depth = 0 if owner is not None and owner[0] == process else depth
        if not depth:
            owner = None
            if waiting:
                ticket, number = waiting.pop(0)
                owner, depth = (ticket[0], number), 1
                assert table.woken.pop() == (ticket, CallAnswer.DONE)
        assert not table.woken
        assert (table.owner, len(table.tickets)) == (owner, depth)
        assert list(table.waiting) == [ticket for ticket, _ in waiting]


@given(st.lists(st.tuples(st.sampled_from(["wait", "notify", "stop", "keep", "return", "die"]), WHO,
                          st.integers(0, 3)), max_size=60))  # fmt: skip
@settings(deadline=None)
def test_a_notification_is_lost_only_if_no_call_waits(steps: list[tuple[str, bytes, int]]) -> None:
    table, returned = Notifications(), 0
    for turn, (step, process, count) in enumerate(steps):
        notified, waiting = sorted(table.notified), list(table.waiting)
        expected = returned + len(notified)
        if step == "wait":
            table.wait((process, turn))
        elif step == "notify":
            table.notify(count)
            expected += min(count, len(waiting))
        elif step == "return" and notified:
            table.returned(notified[0])
            returned += 1
        elif step in ("stop", "keep") and notified:
            assert table.stop_waiting(notified[0], step == "keep") is CallAnswer.DONE
            expected -= step == "stop" and not waiting
        elif step == "die":
            table.died(process)
            lost = sum(one[0] == process for one in notified)
            others = sum(one[0] != process for one in waiting)
            expected -= max(0, lost - others)
        assert returned + len(table.notified) == expected
        assert not table.notified & set(table.waiting)


@given(st.integers(1, 3), st.booleans(), st.lists(st.tuples(st.sampled_from(
    ["arrive", "act", "late", "leave", "abort", "reset", "die"]), WHO), max_size=60))  # fmt: skip
@settings(deadline=None)
def test_a_barrier_lets_whole_rounds_go_on(
    parties: int, acts: bool, steps: list[tuple[str, bytes]]
) -> None:
    table = Gathering(parties)
    answers: Counter[CallAnswer] = Counter()
    for turn, (step, process) in enumerate(steps):
        if step == "arrive":
            answer = table.arrive((process, turn), True, acts)
            answers[answer] += 1
        elif step == "act" and table.acting is not None:
            assert table.acted(table.acting)
            answers[CallAnswer.DONE] += 1
            answers[CallAnswer.ACT] -= 1
        elif step == "late" and table.waiting:
            assert table.give_up(next(iter(table.waiting))) is CallAnswer.ENDED
            assert table.broken
        elif step == "leave" and table.waiting:
            ticket = next(iter(table.waiting))
            table.leave(ticket)
            answers[CallAnswer.WAIT] -= 1
        elif step in ("abort", "reset"):
            answers[CallAnswer.ACT] = 0
            getattr(table, step)()
            assert table.broken == (step == "abort")
        elif step == "die":
            gone = any(one[0] == process for one in table.waiting) or (
                table.acting is not None and table.acting[0] == process
            )
            broken = table.broken
            table.died(process)
            assert table.broken == (broken or gone)
        for _, answer in table.woken:
            answers[answer] += 1
            answers[CallAnswer.WAIT] -= 1
        table.woken.clear()
        if table.acting is None:
            answers[CallAnswer.ACT] = 0
        assert answers[CallAnswer.DONE] % parties == 0, "no part of a round goes on"
        assert answers[CallAnswer.WAIT] == len(table.waiting) + len(table.round)
        assert len(table.waiting) < parties or table.acting is not None


def test_barrier_with_more_calls_than_parties_lets_each_round_run_the_action() -> None:
    table = Gathering(2)
    calls = [(b"a", turn) for turn in range(7)]
    answers = [table.arrive(call, True, True) for call in calls]
    assert answers == [CallAnswer.WAIT, CallAnswer.ACT, *[CallAnswer.WAIT] * 5]
    for first in range(0, 6, 2):
        assert table.acting == calls[first + 1]
        assert table.acted(table.acting)
        assert (calls[first], CallAnswer.DONE) in table.woken
        assert table.indices[calls[first]] == 0
        if first:
            assert table.indices[calls[first + 1]] == 1
    assert table.acting is None
    assert list(table.waiting) == calls[6:]
    assert not table.broken


def test_getter_of_the_next_item_is_woken_while_an_item_may_come_back() -> None:
    """Only a call makes the table decide that the item does not come back."""
    table = QueueTable(0)
    first, second = (b"a", 1), (b"b", 2)
    assert table.take(first, True, True) is CallAnswer.WAIT
    assert table.take(second, True) is CallAnswer.WAIT
    table.put((b"c", 3), 0, False)
    assert isinstance(table.take(first, True, True), Item)
    table.put((b"c", 4), 1, False)
    assert [ticket for ticket, _ in table.woken] == [first, second]
    assert table.take(second, True) is CallAnswer.BUSY
    table.decide()
    assert table.take(second, True) == Item(2, 1)


STEPS = st.sampled_from(["put", "take", "take for sure", "keep", "give back", "stop", "die"])


@given(st.lists(st.tuples(STEPS, WHO, st.booleans()), max_size=80))
@settings(deadline=None)
def test_items_that_come_back_stay_in_order_and_no_call_is_forgotten(
    steps: list[tuple[str, bytes, bool]],
) -> None:
    table = QueueTable(0)
    uncertain: dict[tuple[bytes, int], Item] = {}  # the call that may give its item back
    waiting: set[tuple[bytes, int]] = set()  # calls that were told to wait
    kept: list[int] = []

    def take(ticket: tuple[bytes, int], may_come_back: bool) -> None:
        found = table.take(ticket, True, may_come_back)
        if isinstance(found, Item):
            assert not uncertain, "no item is taken while an earlier one may come back"
            kept.append(found.number)
            if may_come_back:
                uncertain[ticket] = found
        else:
            waiting.add(ticket)

    def settle() -> None:
        while table.woken:
            ticket, _ = table.woken.pop(0)
            if ticket in waiting:  # it may have stopped, or died
                waiting.discard(ticket)
                take(ticket, ticket[1] % 2 == 0)

    for number, (step, process, sure) in enumerate(steps):
        if step == "put":
            table.put((process, number), number, False)
        elif step.startswith("take"):
            take((process, 2 * number + sure), not sure)
        elif step in ("keep", "give back") and uncertain:
            ticket, item = uncertain.popitem()
            if step == "keep":
                table.keep_item(ticket)
            else:
                kept.remove(item.number)
                table.give_back(ticket[0], item)
        elif step == "stop" and waiting:
            ticket = min(waiting)
            waiting.discard(ticket)
            table.stop_taking(ticket)
        elif step == "die":
            table.died(process)
            waiting = {one for one in waiting if one[0] != process}
            uncertain = {one: item for one, item in uncertain.items() if one[0] != process}
        settle()
        assert kept == sorted(kept)
        assert bool(uncertain) == (table.uncertain is not None)
        assert not table.getters or len(table.items) <= len(table.called)
        if not uncertain:
            assert not table.busy
            assert not waiting or not table.items
