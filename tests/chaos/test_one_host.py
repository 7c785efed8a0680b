"""A live cluster of one host under random deaths, against a plain model.

What is put, computed, reduced and deleted is what the model says, whoever is killed or stopped
meanwhile: workers and the manager. Arrays hold small whole numbers, so any order of adding gives
the same bits. After every run no process, no descriptor and no name is left (tests/conftest.py
looks at the first and the last).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import hoplite_mp
from tests.support.functions import double, integers
from tests.support.processes import processes_named
from tests.support.waiting import eventually

PATIENCE_S = 60.0
WORKERS = 3
# Small ones travel inline, large ones lie in blocks.
COUNTS = st.sampled_from([10, 1000, 30_000, 300_000])
PICKS = st.integers(0, 1 << 16)
SEEDS = st.integers(0, 1 << 16)
# A manager that dies ten times within ten seconds is not started again.
MANAGER_DEATHS_MAX = 6
# A task is tried again as often as all kills of a run could hit it.
RETRIES = 100


class Stored:
    """One ref, and what it must be."""

    def __init__(self, ref: Any, value: Any, made: bool, above: Stored | None = None) -> None:
        self.ref = ref
        self.above = above  # what the task was given
        self.value = value  # an array; None: its task fails
        self.made = made  # by a task: it may have to wait for a worker
        self.deleted = False

    def may_be_lost(self) -> bool:
        """A task may have to be tried again when what it was given is deleted."""
        return self.deleted or (self.above is not None and self.above.may_be_lost())


def slow(array: Any) -> Any:
    time.sleep(0.05)
    return array + 1


def fail(array: Any) -> Any:
    raise ZeroDivisionError("as it is meant to be")


def member(turn: int, count: int) -> tuple[tuple[int, ...], float]:
    g = hoplite_mp.current().group("chaos", 2, timeout=PATIENCE_S)
    with g:
        got = g.allreduce(np.full(count, turn + 0.25 * g.rank))
        assert got[0] == got[-1]
        return g.contributors, float(got[0])


class Chaos(RuleBasedStateMachine):
    """One cluster; every rule is something that a program does, or that happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.descriptors = len(os.listdir("/proc/self/fd"))
        self.others = set(psutil.Process().children(recursive=True))
        self.c = hoplite_mp.Cluster(workers=WORKERS, memory="256MiB")
        self.stored: list[Stored] = []
        self.stopped: list[psutil.Process] = []
        self.groups = 0  # all of one name
        # Counted as asked for: what a rule may do must not depend on how quick others are.
        self.stops = self.manager_deaths = 0

    def pick(self, number: int) -> Stored:
        return self.stored[number % len(self.stored)]

    def get(self, one: Stored) -> None:
        """What the model says, or the right error."""
        if one.made:
            self.go_on()
        try:
            got = self.c.get(one.ref, timeout=PATIENCE_S)
        except ZeroDivisionError:
            assert one.value is None
        except hoplite_mp.ObjectLostError:
            assert one.may_be_lost()
        else:
            # What was read before it was deleted may still be at hand.
            assert one.value is not None
            assert np.array_equal(got, one.value)

    # ---- what a program does

    @rule(seed=SEEDS, count=COUNTS)
    def put(self, seed: int, count: int) -> None:
        value = integers(seed, count)
        self.stored.append(Stored(self.c.put(value), value, False))

    @precondition(lambda self: self.stored)
    @rule(number=PICKS, function=st.sampled_from([double, slow, fail]))
    def submit(self, number: int, function: Any) -> None:
        one = self.pick(number)
        if one.deleted:
            return
        future = self.c.options(retries=RETRIES).submit(function, one.ref)
        value = None
        if one.value is not None and function is not fail:
            value = function(one.value)
        self.stored.append(Stored(future.ref, value, True, one))

    @precondition(lambda self: self.stored)
    @rule(number=PICKS)
    def read(self, number: int) -> None:
        self.get(self.pick(number))

    @precondition(lambda self: self.stored)
    @rule(number=PICKS, others=st.lists(PICKS, min_size=1, max_size=4), least=st.booleans())
    def reduce(self, number: int, others: list[int], least: bool) -> None:
        first = self.pick(number)
        if first.value is None or first.may_be_lost():
            return
        alike = [
            one
            for one in map(self.pick, others)
            if one.value is not None
            and not one.may_be_lost()
            and one.value.shape == first.value.shape
        ]
        members = [first, *alike]
        num = max(1, len(members) - 1) if least else len(members)
        ref = self.c.reduce([one.ref for one in members], num=num)
        if any(one.made for one in members):
            self.go_on()
        got = self.c.get(ref, timeout=PATIENCE_S)
        contributors = ref.contributors
        assert num <= len(contributors) <= len(members)
        assert np.array_equal(got, sum(members[i].value for i in contributors))
        self.stored.append(Stored(ref, np.array(got), True))

    @rule(count=st.sampled_from([5, 50_000]))
    def group(self, count: int) -> None:
        self.go_on()
        self.groups += 1
        futures = [self.c.options(retries=0).submit(member, self.groups, count) for _ in range(2)]
        found = {one.result(PATIENCE_S) for one in futures}
        assert found == {((0, 1), 2 * self.groups + 0.25)}

    @precondition(lambda self: self.stored)
    @rule(number=PICKS)
    def delete(self, number: int) -> None:
        one = self.pick(number)
        if one.made:
            self.go_on()
            self.c.wait([one.ref], timeout=PATIENCE_S)
        self.c.delete(one.ref)
        one.deleted = True

    @precondition(lambda self: self.stored)
    @rule(number=PICKS)
    def forget(self, number: int) -> None:
        del self.stored[number % len(self.stored)]

    # ---- what happens to it

    @rule(number=PICKS)
    def kill_worker(self, number: int) -> None:
        found = processes_named("hoplite worker")
        if found:
            victim = found[number % len(found)]
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()
            self.stopped = [one for one in self.stopped if one != victim]

    @precondition(lambda self: self.stops < WORKERS)
    @rule(number=PICKS)
    def stop_worker(self, number: int) -> None:
        self.stops += 1
        found = [one for one in processes_named("hoplite worker") if one not in self.stopped]
        if found:
            victim = found[number % len(found)]
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.send_signal(signal.SIGSTOP)
                self.stopped.append(victim)

    @rule()
    def go_on(self) -> None:
        for one in self.stopped:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signal.SIGCONT)
        self.stopped, self.stops = [], 0

    @precondition(lambda self: self.manager_deaths < MANAGER_DEATHS_MAX)
    @rule()
    def kill_manager(self) -> None:
        self.manager_deaths += 1
        for one in processes_named("hoplite manager"):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    # ---- the end

    def teardown(self) -> None:
        try:
            self.go_on()
            for one in self.stored:
                self.get(one)
        finally:
            self.stored = []
            self.go_on()
            self.c.shutdown()
            del self.c
        deadline = time.monotonic() + PATIENCE_S
        while len(os.listdir("/proc/self/fd")) > self.descriptors:
            assert time.monotonic() < deadline, "descriptors are left"
            time.sleep(0.01)
        eventually(lambda: set(psutil.Process().children(recursive=True)) <= self.others)


def run(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        Chaos,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a run is not repeatable
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_chaos() -> None:
    run(6, 25)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_much_chaos() -> None:
    run(int(os.environ.get("HOPLITE_MP_CHAOS", "300")), 60)
