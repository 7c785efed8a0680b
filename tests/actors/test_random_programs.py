"""Random programs of handles, calls, deaths and restarts, against what an actor promises.

A program makes an actor with random options, calls it from here and from tasks, hands its handle
around and drops it, lets it die inside a call or kills it from outside, and closes or kills it. The
actor keeps a journal, and each result shows all of it, so that afterwards each outcome tells which
process has applied which calls. The model says what is possible, given where deaths may have been.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import hoplite_mp
from hoplite_mp import Actor, ActorLostError
from tests.support.functions import Journal
from tests.support.waiting import eventually

STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 20)),
    st.tuples(st.just("add"), st.integers(1, 3)),
    st.sampled_from(["fail", "die", "kill process", "elsewhere", "copy", "drop", "settle"]).map(
        lambda step: (step, 1)
    ),
)
OPTIONS = st.fixed_dictionaries(
    {
        "restarts": st.integers(0, 3),
        "retries": st.sampled_from([0, 0, 5]),
        "checkpoint": st.sampled_from([None, 1, 1, 3]),
    }
)
ENDS = st.sampled_from(["drop", "close", "kill"])


@dataclass
class Run:
    """What a program has done, in the order in which the actor's calls were made."""

    c: hoplite_mp.Cluster
    options: dict[str, Any]
    handles: list[Any]
    calls: list[tuple[str, int, Any]] = field(default_factory=list)  # kind, number, Future
    killed: int = 0
    last_pid: int = 0

    def call(self, kind: str) -> None:
        number = len(self.calls)
        future = getattr(self.handles[-1], kind)(number)
        self.calls.append((kind, number, future))

    def step(self, step: str, count: int) -> None:
        if step in ("add", "fail", "die"):
            for _ in range(count):
                self.call(step)
        elif step == "kill process":
            self.settle()
            self.call("add")  # it may be under way, or not have begun, or be done
            if self.last_pid:
                self.killed += 1
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.last_pid, signal.SIGKILL)
        elif step == "elsewhere":
            self.settle()  # calls of another process have no order with those of this one
            number = len(self.calls)
            future = self.c.submit(_call, self.handles[-1], number)
            self.calls.append(("add", number, future))
            self.settle()
        elif step == "copy":
            self.handles.append(pickle.loads(pickle.dumps(self.handles[-1])))
        elif step == "drop" and len(self.handles) > 1:
            self.handles.pop()
        elif step == "settle":
            self.settle()

    def settle(self) -> None:
        for kind, _, future in self.calls:
            if future.exception(60) is None and kind == "add":
                self.last_pid = future.result()[0]

    def outcomes(self) -> list[tuple[str, int, tuple[int, tuple[int, ...]] | None]]:
        """None: lost with the process."""
        found = []
        for kind, number, future in self.calls:
            error = future.exception(60)
            if error is None:
                found.append((kind, number, future.result()))
            elif isinstance(error, KeyError):
                found.append((kind, number, error.args))
            else:
                assert isinstance(error, ActorLostError), error
                found.append((kind, number, None))
        return found


def _call(handle: Any, number: int) -> Any:
    return handle.add(number).result(60)


def check(run: Run, ended: str) -> None:
    """Is that possible?"""
    restarts, retries = run.options["restarts"], run.options["retries"]
    checkpoint = run.options["checkpoint"]
    outcomes = run.outcomes()
    deaths = sum(kind == "die" for kind, *_ in outcomes) + run.killed
    tries = restarts + 1
    pids: list[int] = []
    lost_since: list[int] = []  # calls since the last result that were lost
    known: tuple[int, ...] = ()  # the journal as the last result showed it
    lost = 0
    for kind, number, result in outcomes:
        assert kind != "die" or result is None
        if result is None:
            lost += 1
            lost_since.append(number)
            continue
        pid, journal = result
        assert journal[-1] == number, "a call shows its own number last"
        assert list(journal) == sorted(set(journal)), "in order, and each once"
        before = journal[:-1]
        if pids and pid == pids[-1]:
            assert before == known, "a process goes on where it was"
        else:
            assert pid not in pids, "a process that was replaced does not come back"
            pids.append(pid)
            if checkpoint is None:
                assert before == (), "the constructor has run again"
            elif checkpoint == 1:
                assert set(known) <= set(before), "what was seen is not lost"
                assert set(before) - set(known) <= set(lost_since)
            else:
                whole = (*known, *lost_since)
                assert before == tuple(one for one in whole if one in before)
                assert len(set(known) - set(before)) < checkpoint, "fewer than k calls are lost"
        known, lost_since = journal, []
    assert len(pids) <= tries
    if not deaths and ended != "kill":
        assert lost == 0
    if deaths <= restarts and not retries and ended != "kill":
        assert lost <= deaths, "each death costs at most the call that ran"
    dies = any(kind == "die" for kind, *_ in outcomes)  # as often as it is tried
    if retries > deaths and deaths <= restarts and ended != "kill" and not dies:
        assert lost == 0, "a call that is tried again is not lost"
    event(f"{len(pids)} processes")


def play(
    c: hoplite_mp.Cluster, options: dict[str, Any], steps: list[tuple[str, int]], end: str
) -> None:
    run = Run(c, options, [])
    run.handles.append(c.options(**options).actor(Journal))
    for step, count in steps:
        run.step(step, count)
    if end == "drop":
        run.handles.clear()
    else:
        getattr(Actor, end)(run.handles[-1])
        after = run.handles[-1].add(-1)
        assert isinstance(after.exception(60), ActorLostError)
        run.handles.clear()
    check(run, end)
    pid = run.last_pid
    if pid:
        eventually(lambda: not _lives(pid))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("examples", [8, pytest.param(400, marks=pytest.mark.soak)])
def test_random_programs(c: hoplite_mp.Cluster, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(OPTIONS, st.lists(STEPS, max_size=12), ENDS)
    def run(options: dict[str, Any], steps: list[tuple[str, int]], end: str) -> None:
        play(c, options, steps, end)

    run()
