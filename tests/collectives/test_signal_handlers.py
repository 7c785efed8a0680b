"""What a signal handler raises in the middle of a Group's call is this rank's alone: no mistake of
the call, of which all ranks would hear."""

from __future__ import annotations

import functools
import gc
import signal
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp._common.interruptions import is_interruption

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


class Late(Exception):
    """What handlers raise."""


def raises(error: BaseException, *_: Any) -> None:
    raise error


class Handler:
    def __call__(self, *_: Any) -> None:
        raise Late

    def method(self, *_: Any) -> None:
        raise Late


@pytest.fixture
def handler() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGUSR2)
    yield lambda handles: signal.signal(signal.SIGUSR2, handles)
    signal.signal(signal.SIGUSR2, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGUSR2)


class Interrupting:
    """A value in whose pickling the signal comes."""

    def __init__(self) -> None:
        self.armed = True

    def __reduce__(self) -> tuple[Any, ...]:
        if self.armed:
            self.armed = False
            interrupt()
        return str, ("pickled",)


def decorated(function: Any) -> Any:
    def wrapper(*about: Any, **named: Any) -> Any:
        return function(*about, **named)

    return wrapper


@decorated
def decorated_handler(number: int, frame: Any) -> None:
    raise Late


@decorated
def no_handler(value: Any) -> None:
    raise Late


def once(number: int, frame: Any) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise Late


@pytest.mark.parametrize(
    "handles",
    [
        lambda *_: raises(Late()),
        functools.partial(raises, Late()),
        Handler(),
        Handler().method,
        decorated_handler,
        once,
    ],
)
def test_it_is_recognised_by_the_handlers_arguments(handler: Any, handles: Any) -> None:
    handler(handles)
    with pytest.raises(Late) as caught:
        interrupt()
    assert is_interruption(caught.value)
    with pytest.raises(Late) as caught:
        no_handler(3)
    assert not is_interruption(caught.value)


@pytest.mark.parametrize("op", ["nonsense", "max"])
def test_a_mistake_while_an_earlier_interruption_is_handled(
    cluster: Cluster, handler: Any, op: str
) -> None:
    """It has the interruption as its context, and is a mistake like any other."""
    handler(Handler())
    name, x = f"handled {op}", np.ones(9000)
    with cluster.group(name, 2, 0) as g, cluster.group(name, 2, 1) as other:
        waits = other.allreduce_async(x, "sum")
        try:
            interrupt()
        except Late:
            with pytest.raises(ValueError, match=r"nonsense|different calls"):
                g.allreduce(x, op)
        assert g.calls == 1
        assert isinstance(waits.exception(20), ValueError)


@pytest.mark.parametrize("error", [Late("too late"), TimeoutError("too late"), ValueError()])
def test_a_call_that_was_interrupted_is_made_again(
    cluster: Cluster, handler: Any, error: BaseException
) -> None:
    handler(functools.partial(raises, error))
    name, value = f"handlers {error!r}", Interrupting()
    with cluster.group(name, 2, 0) as g, cluster.group(name, 2, 1) as other:
        waits = other.allgather_async("other")
        with pytest.raises(type(error)) as caught:
            g.allgather(value)
        assert caught.value is error
        assert g.calls == 0
        right = ["pickled", "other"]
        assert (g.allgather(value), waits.result(20)) == (right, right)


def test_a_leader_that_was_interrupted_while_it_combines(cluster: Cluster, handler: Any) -> None:
    handler(Handler())
    with cluster.group("combining", 2, 0) as g, cluster.group("combining", 2, 1) as other:
        combine, kept = g._leading.combine, []

        def combines(*about: Any) -> Any:
            if not kept:
                kept.append(about)
                interrupt()
            return combine(*about)

        g._leading.combine = combines  # type: ignore[method-assign]
        given = np.full((90, 100), 1, order="F")  # an object, which the leader combines in Python
        waits = other.allreduce_async(2 * given)
        with pytest.raises(Late):
            g.allreduce(given)
        assert g.calls == 0
        assert g.allreduce(given)[-1, -1] == waits.result(20)[-1, -1] == 3


CALLS: dict[str, Any] = {
    "own mistake": lambda g, x: g.allreduce(x, "nonsense"),
    "another op": lambda g, x: g.allreduce_async(x, "sum").result(20),
    "handler": lambda g, x: g.allgather([x, Interrupting()]),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_failed_call_leaves_no_reference_cycle(cluster: Cluster, handler: Any, how: str) -> None:
    handler(Handler())
    gc.collect()
    gc.disable()
    try:
        with cluster.group(f"cycle {how}", 2, 0) as g, cluster.group(f"cycle {how}", 2, 1) as other:
            waits = (
                other.allgather_async(1)
                if how == "handler"
                else other.allreduce_async(np.ones(20_000), "max")
            )
            given = np.ones(20_000)
            kept = weakref.ref(given)
            with pytest.raises((ValueError, Late)):
                CALLS[how](g, given)
            del given
            assert kept() is None
            if how == "handler":
                g.allgather(1)
                waits.result(20)
            else:
                assert isinstance(waits.exception(20), ValueError)
    finally:
        gc.enable()


INTERRUPTED = """
import random, signal, time
import numpy as np, hoplite_mp
class Late(Exception): pass
def handles(*_):
    if armed:
        raise Late
armed, chance, interrupted = False, random.Random(1), 0
signal.signal(signal.SIGALRM, handles)
with hoplite_mp.Cluster(workers=0) as c, c.group("interrupted", 1, timeout=60) as g:
    g.barrier_async().result()
    until = time.monotonic() + 3
    while time.monotonic() < until:
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + chance.random() * 2.5e-4)
                g.allreduce(np.ones(20_000))
            finally:
                armed = False
        except Late:
            interrupted += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert g.allgather_async(7).result(30) == [7]
print(interrupted > 0)
"""


def test_waits_that_are_interrupted_at_any_moment_leave_the_groups_thread_running() -> None:
    """The condition of a standard Future stays held if the exception comes while it is taken. In a
    process of its own, whose alarm is not that of the test."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
