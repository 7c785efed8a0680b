"""What a signal handler raises in the middle of a Group's call is this rank's alone, and ends its
membership. Only an error of a type that calls document may be taken for a mistake."""

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

from hoplite_mp import ClosedError
from hoplite_mp._common.signals import is_interruption
from tests.support.waiting import eventually

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

    def __reduce__(self) -> tuple[Any, ...]:
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


@pytest.mark.parametrize("error", [Late("too late"), TimeoutError("too late")])
def test_call_interrupted_by_a_handler_ends_membership_whatever_it_raises(
    cluster: Cluster, handler: Any, error: BaseException
) -> None:
    """Here before the part was given, so the other rank gets a result without it."""
    handler(functools.partial(raises, error))
    name = f"handlers {error!r}"
    g, other = (cluster.group(name, 2, rank, timeout=20) for rank in range(2))
    waits = other.allgather_async("other")
    with pytest.raises(type(error)) as caught:
        g.allgather(Interrupting())
    assert caught.value is error
    with pytest.raises(ClosedError, match=f"because a call ended by {type(error).__name__}"):
        g.allgather("later")
    assert waits.result(20) == [None, "other"]
    with cluster.group(name, 2, 0, timeout=20) as again:
        waits = again.allgather_async("again")
        eventually(lambda: other.allgather("other") == ["again", "other"], "it takes part")
        assert waits.result(20) == ["again", "other"]
    other.close()


def test_documented_error_that_a_handler_raises_for_a_part_is_every_ranks(
    cluster: Cluster, handler: Any
) -> None:
    """It is not told from a mistake of the rank, and ends no membership."""
    handler(functools.partial(raises, ValueError("of the handler")))
    with cluster.group("mistake", 2, 0) as g, cluster.group("mistake", 2, 1) as other:
        waits = other.allgather_async("other")
        with pytest.raises(ValueError, match="of the handler"):
            g.allgather(Interrupting())
        with pytest.raises(ValueError, match="rank 0: of the handler"):
            waits.result(20)
        waits = other.allgather_async("other")
        assert g.allgather("later") == waits.result(20) == ["later", "other"]


def test_leader_interrupted_while_it_combines_leaves_the_call_to_the_others(
    cluster: Cluster, handler: Any
) -> None:
    handler(Handler())
    g, *others = (cluster.group("combining", 3, rank, timeout=20) for rank in range(3))

    def combines(*about: Any) -> Any:
        interrupt()

    g._calls._leading.combine = combines  # type: ignore[method-assign]
    given = np.full((90, 100), 1, order="F")  # an object, which the leader combines in Python
    waits = [other.allreduce_async(2 * given) for other in others]
    with pytest.raises(Late):
        g.allreduce(given)
    with pytest.raises(ClosedError, match="because a call ended by Late"):
        g.barrier()
    assert [wait.result(20)[-1, -1] for wait in waits] == [4, 4]
    assert [other.contributors for other in others] == [(1, 2), (1, 2)]
    for other in others:
        other.close()


CALLS: dict[str, Any] = {
    "own mistake": lambda g, x: g.allreduce(x, "nonsense"),
    "another op": lambda g, x: g.allreduce_async(x, "sum").result(20),
    "handler": lambda g, x: g.allgather([x, Interrupting()]),
}


@pytest.mark.parametrize("how", CALLS)
def test_call_that_has_failed_leaves_no_reference_cycle(
    cluster: Cluster, handler: Any, how: str
) -> None:
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
                assert waits.result(20) == [None, 1]
            else:
                assert isinstance(waits.exception(20), ValueError)
    finally:
        gc.enable()


INTERRUPTED = """
import random, signal, sys, time
import numpy as np, hoplite_mp
class Late(Exception): pass
def handles(*_):
    if armed:
        raise Late
armed, chance, left = False, random.Random(1), 0
signal.signal(signal.SIGALRM, handles)
with hoplite_mp.Cluster(workers=0) as c:
    g = c.group("interrupted", 1, timeout=60)
    until = time.monotonic() + 1.5
    while time.monotonic() < until or not left:
        if sys.argv[1] == "behind background calls":
            g.barrier_async().result()
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, 2e-5 + chance.random() * 2.5e-4)
                g.allreduce(np.ones(20_000))
            finally:
                armed = False
        except Late:
            try:
                g.barrier()
            except hoplite_mp.ClosedError as error:
                assert "because a call ended by Late" in str(error)
                left += 1
            else:  # it came before the call had begun, or when it was over
                g.close()
            g = c.group("interrupted", 1, timeout=60)
            assert g.allgather(7) == [7] and g.calls == 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert g.allgather_async(7).result(30) == [7]
print(left > 0)
"""


@pytest.mark.parametrize("where", ["behind background calls", "alone"])
def test_plain_call_interrupted_by_an_alarm_at_any_moment_ends_membership(where: str) -> None:
    """The Group's thread ends, too: the condition of a standard Future would stay held if the
    exception came while it is taken. In a process of its own, whose alarm is not that of the
    test."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, where], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (0, "True\n")
