"""Reductions of a Group by a function, over values of any kind."""

from __future__ import annotations

import itertools
import operator
import os
import signal
import sys
import threading
import time
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError
from hoplite_mp._common.clock import deadline_ns
from hoplite_mp._group.messages import Receive
from hoplite_mp._protocol.local import RESULT_TAG
from tests.support.group_members import in_threads, until_all_take_part
from tests.support.waiting import PATIENCE_S, Gate, eventually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp import Cluster, Group

BIG = 1 << 70


def join_text(a: str, b: str) -> str:
    """Associative, and not commutative."""
    return a + b


def extend(a: list[int], b: list[int]) -> list[int]:
    """Changes its first argument."""
    a.extend(b)
    return a


VALUES: dict[str, tuple[Callable[[int], Any], Any, Any]] = {
    "ints beyond 64 bits": (lambda r: BIG + r, operator.add, 3 * BIG + 3),
    "decimals": (lambda r: Decimal("0.1"), operator.add, Decimal("0.3")),
    "sets": (lambda r: {r, 7}, operator.or_, {0, 1, 2, 7}),
    "lists": (lambda r: [r], operator.add, [0, 1, 2]),
    "in place": (lambda r: [r], extend, [0, 1, 2]),
    "text in order": (str, join_text, "012"),
    "lambda": (lambda r: (r, -r), lambda a, b: (a[0] + b[0], min(a[1], b[1])), (3, -2)),
    "builtin": (lambda r: f"{r}", max, "2"),
    "large": (lambda r: bytes([r]) * 300_000, operator.add, b"\0" * 300_000 + b"\1" * 300_000
              + b"\2" * 300_000),
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_values_of_any_kind_are_folded_in_the_order_of_ranks(cluster: Cluster, what: str) -> None:
    give, op, total = VALUES[what]

    def body(g: Group) -> Any:
        x = give(g.rank)
        found = [g.allreduce(x, op=op), g.reduce(x, op=op, root=1), g.scan(x, op=op)]
        found += [g.exscan(x, op=op), g.allreduce_async(x, op=op).result(20)]
        assert x == give(g.rank), "the rank's own value stays as it is"
        return found, g.calls, g.contributors

    upto = [give(0), op(give(0), give(1)), total]
    for rank, (found, calls, contributors) in enumerate(in_threads(cluster, what, 3, body)):
        reduced = total if rank == 1 else None
        assert found == [total, reduced, upto[rank], [None, *upto][rank], total]
        assert (calls, contributors) == (5, (0, 1, 2)), "each is one call"


def test_arrays_are_writable_and_fill_out(cluster: Cluster) -> None:
    def subtract(a: Any, b: Any) -> Any:
        return a - b

    def body(g: Group) -> Any:
        x, out = np.full(3, 10.0**g.rank), np.empty(3)
        found = g.allreduce(x, op=subtract)
        found += 1
        assert g.allreduce(x, op=subtract, out=out) is out
        part = g.reduce_scatter(np.arange(4) + g.rank, op=operator.add)
        items = g.reduce_scatter(([g.rank], [-g.rank]), op=lambda a, b: (a[0] + b[0], a[1] + b[1]))
        return found.tolist(), out.tolist(), part.tolist(), items

    a, b = in_threads(cluster, "fold arrays", 2, body)
    assert a == ([-8.0] * 3, [-9.0] * 3, [1, 3], [0, 1])
    assert b == ([-8.0] * 3, [-9.0] * 3, [5, 7], [0, -1])


def test_the_leading_rank_alone_folds(cluster: Cluster) -> None:
    def where(a: Any, b: Any) -> Any:
        return {*a, *b, threading.get_ident()}

    def body(g: Group) -> Any:
        return g.allreduce(set(), op=where), threading.get_ident()

    found = in_threads(cluster, "who folds", 3, body)
    assert [one for one, _ in found] == [{found[0][1]}] * 3


class SpecialError(Exception):
    def __init__(self, first: int, second: str) -> None:
        super().__init__(first, second)


MISTAKES: dict[str, tuple[Callable[[Group], Any], type[Exception], str]] = {
    "raises": (lambda g: g.allreduce(g.rank, op=_raise), SpecialError, "two"),
    "wrong type": (lambda g: g.reduce(g.rank or "text", op=operator.add), TypeError, "concatenate"),
    "other function": (
        lambda g: g.allreduce(1, op=operator.or_ if g.rank else operator.add),
        ValueError,
        "different calls: allreduce by _operator.add and allreduce by _operator.or_",
    ),
    "other kind": (
        lambda g: g.scan(1, op=max) if g.rank else g.allreduce(1, op=max),
        ValueError,
        "allreduce by builtins.max and scan by builtins.max",
    ),
    "a name": (
        lambda g: g.allreduce(1, op="sum") if g.rank else g.allreduce(1, op=max),
        ValueError,
        r"allreduce by builtins.max and allreduce\('sum'\)",
    ),
    "allgather": (
        lambda g: g.allgather(1) if g.rank else g.allreduce(1, op=max),
        ValueError,
        r"allreduce by builtins.max and allgather\(\)",
    ),
    "does not pickle": (
        lambda g: g.allreduce(threading.Lock() if g.rank else 1, op=max),
        TypeError,
        "cannot pickle the value given of type 'lock'",
    ),
    "part does not pickle": (
        lambda g: g.allreduce({"a": threading.Lock()} if g.rank else 1, op=max),
        TypeError,
        "cannot pickle the value given of type 'dict': .*: item 'a' is a lock",
    ),
    "result does not pickle": (
        lambda g: g.allreduce(1, op=lambda a, b: [a, threading.Lock()]),
        TypeError,
        "cannot pickle the result of op of type 'list': .*: item 1 is a lock",
    ),
    "ufunc": (lambda g: g.allreduce(1, op=np.subtract), ValueError, "associative and commutative"),
    "no function": (lambda g: g.allreduce(1, op=3), ValueError, "a function of two values"),
    "name and int": (lambda g: g.allreduce(BIG), TypeError, "beyond 64 bits; op=callable"),
    "name and list": (lambda g: g.allreduce([1]), TypeError, "plain array of it; op=callable"),
    "name and decimal": (lambda g: g.scan(Decimal(1)), TypeError, "decimal.Decimal; op=callable"),
    "scatters a set": (lambda g: g.reduce_scatter({1}, op=operator.or_), TypeError, "one item"),
}  # fmt: skip


def _raise(a: Any, b: Any) -> Any:
    raise SpecialError(1, "two")


@pytest.mark.parametrize("what", MISTAKES)
def test_an_error_reaches_every_rank_and_the_next_call_is_good(cluster: Cluster, what: str) -> None:
    call, kind, words = MISTAKES[what]

    def body(g: Group) -> Any:
        with pytest.raises(kind, match=words):
            call(g)
        return g.allreduce([g.rank], op=operator.add), g.calls

    assert in_threads(cluster, f"fold mistake {what}", 2, body) == [([0, 1], 2)] * 2


def test_messages_of_users_are_not_mixed_with_results(cluster: Cluster) -> None:
    def body(g: Group) -> Any:
        if g.rank == 0:
            g.send("user's", to=1)
        total = g.allreduce([g.rank], op=operator.add)
        received = [] if g.rank == 0 else [g.recv()]
        left = g.probe(timeout=0)
        g.barrier()  # so that no rank probes when the other has left
        return total, *received, left

    found = in_threads(cluster, "fold and messages", 2, body)
    assert found == [([0, 1], None), ([0, 1], "user's", None)]
    with cluster.group("tags", 1) as g, pytest.raises(ValueError, match="tag"):
        g.send(1, to=0, tag=(1 << 31) - 1)


def test_refs_inside_the_values_stay_alive(cluster: Cluster) -> None:
    def body(g: Group) -> Any:
        refs = g.allreduce([cluster.put(np.full(50_000, g.rank))], op=operator.add)
        g.barrier()
        return [int(array[0]) for array in cluster.get(refs)]

    assert in_threads(cluster, "fold refs", 2, body) == [[0, 1]] * 2


@pytest.mark.parametrize("in_background", [False, True])
def test_fold_that_times_out_at_its_leader_ends_membership(
    cluster: Cluster, tmp_path: Path, in_background: bool
) -> None:
    name = f"slow fold {in_background}"
    gate, alone = Gate(tmp_path), Gate(tmp_path, "alone")

    def slow(a: Any, b: Any) -> Any:
        gate.wait()
        return a + b

    def late(g: Group) -> Any:
        if in_background:
            g.barrier_async().result()
        receive = g._folds._receive_result

        def soon_late(call: int, leader: int, deadline: int, ended: Any) -> Any:
            """The call is committed, so only the leader's fold can be late."""
            g._member.timeout = 0.1
            return receive(call, leader, deadline_ns(0.1), ended)

        g._folds._receive_result = soon_late  # type: ignore[method-assign]
        with pytest.raises(HopliteTimeoutError, match=r"rank 0 did not fold .* within 0.1 s"):
            g.allreduce([g.rank], op=slow)
        for call in (g.barrier, g.barrier_async, g.recv):
            with pytest.raises(ClosedError, match="because a call timed out"):
                call()
        gate.open()
        alone.wait()
        with cluster.group(name, 2, 1, timeout=20) as again:
            return again.allgather(again.rank)

    def body(g: Group) -> Any:
        if g.rank:
            return late(g)
        if in_background:
            g.barrier()
        assert g.allreduce([g.rank], op=slow) == [0, 1]
        assert g.allreduce([g.rank], op=operator.add) == [0]
        alone.open()
        while None in (found := g.allgather(g.rank)):
            time.sleep(0.01)
        return found

    assert in_threads(cluster, name, 2, body) == [[0, 1]] * 2


class Interruption(BaseException):
    """What a signal handler may raise."""


def once(interrupt: Callable[[], Any], step: Callable[..., Any], before: bool) -> Any:
    """A function that does what `step` does, and is interrupted the first time."""
    calls = itertools.count()

    def stepped(*args: Any) -> Any:
        first = next(calls) == 0
        if first and before:
            interrupt()
        found = step(*args)
        if first:
            interrupt()
        return found

    return stepped


def interrupt() -> None:
    raise Interruption


def next_fold(g: Group, cluster: Cluster, has_left: bool) -> Any:
    """A fold of all ranks, after those that have left have joined again, and its call's number."""

    def fold(group: Group) -> Any:
        make = lambda: group.allreduce([group.rank, "next"], op=operator.add)  # noqa: E731
        return until_all_take_part(group, make), group.calls

    if not has_left:
        return fold(g)
    with pytest.raises(ClosedError, match="because a call ended by"):
        g.barrier()
    with cluster.group(g.name, g.size, g.rank, timeout=20) as again:
        return fold(again)


def check_next(found: list[Any], size: int) -> None:
    """All ranks have got the same by their `next_fold`."""
    wanted = [one for rank in range(size) for one in (rank, "next")]
    assert [one[0] for one in found] == [wanted] * size
    assert len({one[1] for one in found}) == 1


@pytest.mark.parametrize("op", [operator.add, extend])
def test_leader_interrupted_while_it_sends_results_has_left_and_the_others_fold(
    cluster: Cluster, op: Any
) -> None:
    """One of them has its message already."""

    def interrupted(g: Group) -> None:
        send, sent = g._messages.send_encoded, itertools.count()

        def send_once(*args: Any) -> str:
            if next(sent) == 1:
                raise Interruption
            return send(*args)

        g._messages.send_encoded = send_once  # type: ignore[method-assign]
        with pytest.raises(Interruption):
            g.allreduce([g.rank], op=op)

    def body(g: Group) -> Any:
        g._member.timeout = 20
        first = interrupted(g) if g.rank == 0 else g.allreduce([g.rank], op=op)
        return first, next_fold(g, cluster, g.rank == 0)

    found = in_threads(cluster, f"interrupted sending {op.__name__}", 3, body)
    assert [one[0] for one in found] == [None, [0, 1, 2], [0, 1, 2]]
    check_next([one[1] for one in found], 3)


LEADER_STEPS = {
    "after the commit": ("_calls", "call", False),
    "before it reads the values": ("_calls", "_take", True),
    "before it folds": ("_folds", "_lead_fold", True),
    "while it sends": ("_folds", "_send_result", True),
    "when it has sent": ("_folds", "_send_result", False),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("when", LEADER_STEPS)
def test_leader_interrupted_after_the_commit_has_left_and_the_others_fold(
    cluster: Cluster, when: str, strict: bool
) -> None:
    """Strict ranks get an error instead, unless its message had been sent."""
    folded = threading.Event()
    wanted: Any = [0, 1] if not strict or when == "when it has sent" else PeerLostError

    def body(g: Group) -> Any:
        if g.rank:
            try:
                found: Any = g.allreduce([g.rank], op=operator.add)
            except PeerLostError as error:
                found = type(error)
            folded.set()
            return found, None if strict else next_fold(g, cluster, False)
        component, name, before = LEADER_STEPS[when]
        part = getattr(g, component)
        setattr(part, name, once(interrupt, getattr(part, name), before))
        with pytest.raises(Interruption):
            g.allreduce([g.rank], op=operator.add)
        assert folded.wait(PATIENCE_S), "the other rank waits for the leader"
        return None, None if strict else next_fold(g, cluster, True)

    name = f"interrupted leader {when} {strict}"
    found = in_threads(cluster, name, 2, body, strict=strict)
    assert [one[0] for one in found] == [None, wanted]
    if not strict:
        check_next([one[1] for one in found], 2)


def test_leader_interrupted_while_it_sends_an_error_has_left_and_the_others_raise_it(
    cluster: Cluster,
) -> None:
    """They fold the values themselves. The error of the function ends no membership."""
    raised = threading.Event()

    def body(g: Group) -> Any:
        if g.rank == 0:
            g._folds._send_error = once(interrupt, g._folds._send_error, True)  # type: ignore[method-assign]
        with pytest.raises(SpecialError if g.rank else Interruption):
            g.allreduce([g.rank], op=_raise)
        if g.rank:
            raised.set()
        assert raised.wait(PATIENCE_S), "the other rank waits for the leader"
        return next_fold(g, cluster, g.rank == 0)

    check_next(in_threads(cluster, "interrupted error", 2, body), 2)


@pytest.mark.parametrize("error", [TimeoutError, ValueError])
@pytest.mark.parametrize("rank", [0, 1])
def test_exception_of_a_signal_handler_in_a_fold_ends_the_membership_of_its_rank_alone(
    cluster: Cluster, rank: int, error: type[Exception]
) -> None:
    """Of the leader, or of another rank, which folds itself because the leader has left."""

    def handler(signum: int, frame: Any) -> None:
        raise error

    def body(g: Group) -> Any:
        def add(a: Any, b: Any) -> Any:
            if g.rank == 0 and rank == 1:
                raise Interruption
            if g.rank == rank:
                handler(signal.SIGALRM, sys._getframe())
            return a + b

        first: Any = None
        try:
            first = g.allreduce([g.rank], op=add)
        except (error, Interruption) as raised:
            first = type(raised)
        return first, next_fold(g, cluster, isinstance(first, type))

    found = in_threads(cluster, f"handler in a fold {rank} {error}", 3, body)
    first, second, third = (one[0] for one in found)
    assert (first, third) == (error if rank == 0 else Interruption, [0, 1, 2])
    assert second == ([0, 1, 2] if rank == 0 else error)
    check_next([one[1] for one in found], 3)


def test_leader_that_has_joined_again_lets_the_others_fold(cluster: Cluster) -> None:
    """Its new membership has sent no result of the call before it."""
    joined = threading.Event()

    def body(g: Group) -> Any:
        g._member.timeout = 20
        if g.rank:
            receive = g._folds._receive_result

            def late(*args: Any) -> Any:
                assert joined.wait(PATIENCE_S)
                return receive(*args)

            g._folds._receive_result = late  # type: ignore[method-assign]
            first = g.allreduce([g.rank], op=operator.add)
            return first, until_all_take_part(g, lambda: g.allgather(g.rank))
        g._calls.call = once(interrupt, g._calls.call, False)  # type: ignore[method-assign]
        with pytest.raises(Interruption):
            g.allreduce([g.rank], op=operator.add)
        with cluster.group(g.name, 2, 0, timeout=20) as again:
            joined.set()
            return None, again.allgather(g.rank)

    assert in_threads(cluster, "leader goes on", 2, body) == [(None, [0, 1]), ([0, 1], [0, 1])]


def test_an_error_of_all_ranks_leaves_no_message(cluster: Cluster) -> None:
    def body(g: Group) -> Any:
        with pytest.raises(ValueError, match="different calls"):
            g.allreduce(1, op=max if g.rank else min)
        with pytest.raises(SpecialError):
            g.allreduce([g.rank], op=_raise)
        g.barrier()
        return g._messages.inbox.first(Receive(None, RESULT_TAG, 0))

    assert in_threads(cluster, "no message left", 2, body) == [None, None]


def dying_leader(rank: int, name: str, folder: Path, strict: bool) -> Any:
    def fold(a: Any, b: Any) -> Any:
        if rank == 0:
            (folder / "folds").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return a + b

    with hoplite_mp.current().group(name, 3, rank, strict=strict) as g:
        try:
            found: Any = g.allreduce([rank], op=fold)
        except PeerLostError as error:
            return str(error)
        return found, g.contributors, g.allreduce([rank], op=operator.add), g.contributors


@pytest.mark.parametrize("strict", [False, True])
def test_the_leader_dies_while_it_folds(cluster: Cluster, tmp_path: Path, strict: bool) -> None:
    name = f"leader of a fold dies {strict}"
    futures = cluster.options(retries=0).spmd(dying_leader, 3, name, tmp_path, strict)
    assert isinstance(futures[0].exception(30), hoplite_mp.WorkerLostError)
    assert (tmp_path / "folds").exists()
    for future in futures[1:]:
        if strict:
            assert "lost" in future.result(30) or "has left or died" in future.result(30)
        else:
            assert future.result(30) == ([0, 1, 2], (0, 1, 2), [1, 2], (1, 2))


def killed_between_folds(rank: int, folder: Path) -> Any:
    seen = []
    with hoplite_mp.current().group("killed between folds", 3, rank) as g:
        while True:
            found = g.allreduce([rank], op=operator.add)
            assert found == list(g.contributors)
            seen.append(g.contributors)
            (folder / f"{rank}.{os.getpid()}").touch()
            if len(g.contributors) < 3:
                return g.contributors, g.calls
            time.sleep(0.001)


@pytest.mark.parametrize("victim", [0, 1])
def test_members_are_killed_at_any_time(cluster: Cluster, tmp_path: Path, victim: int) -> None:
    futures = cluster.options(retries=0).spmd(killed_between_folds, 3, tmp_path)
    eventually(lambda: len(list(tmp_path.iterdir())) == 3, "the first calls")
    time.sleep(0.1)
    (pid,) = [int(path.suffix[1:]) for path in tmp_path.glob(f"{victim}.*")]
    os.kill(pid, signal.SIGKILL)
    left = tuple(rank for rank in range(3) if rank != victim)
    found = [futures[rank].result(30) for rank in left]
    assert found[0] == found[1]
    assert found[0][0] == left
