"""A collective call that times out or is interrupted ends the membership of its rank: what the
rank's later calls and the other ranks get, and how it joins again."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import ClosedError, HopliteTimeoutError, PeerLostError
from tests.support.group_members import in_threads, until_all_take_part
from tests.support.interruptions import Interrupt
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hoplite_mp import Cluster, Group

MIB = 1 << 20
LARGE = 20_000  # elements; as float64 more than the board has room for


@pytest.fixture(scope="module", params=["one host", "as several"])
def both(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    listen = {} if request.param == "one host" else {"listen": "127.0.0.1:0"}
    with hoplite_mp.Cluster(workers=2, memory="192MiB", **listen) as made:
        yield made


class Late(Exception):
    """What a signal handler raises."""


def handle(signum: int, frame: Any, error: type[BaseException]) -> None:
    raise error


class RaiseAt(Interrupt):
    """Raises an error of any class, as a signal handler does."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__(at)
        self.error = error

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        try:
            return super().__call__(frame, event, arg)
        except KeyboardInterrupt:
            handle(2, sys._getframe(), self.error)


def raised_at(call: Callable[[], Any], at: int, error: type[BaseException]) -> bool:
    """Makes the call, and raises an error at its step of that number. False: it has fewer steps."""
    interrupt = RaiseAt(at, error)
    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 looks for it only in settrace
    sys.settrace(interrupt)
    try:
        call()
    except error:
        assert interrupt.raised
    finally:
        sys.settrace(before)
    return interrupt.raised


class Other:
    """A member in a thread, which makes one call after the other, and checks each result."""

    def __init__(
        self, cluster: Cluster, name: str, rank: int, call: Callable[[Group], Any]
    ) -> None:
        self.results: list[tuple[tuple[int, ...], Any]] = []
        self.error: BaseException | None = None
        self._stopped = threading.Event()
        self._about = cluster, name, rank, call
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        cluster, name, rank, call = self._about
        try:
            with cluster.group(name, 2, rank, timeout=60) as group:
                while not self._stopped.is_set():
                    found = call(group)
                    self.results.append((group.contributors, found))
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._stopped.set()
        self._thread.join(40)
        assert not self._thread.is_alive()


def total(group: Group, length: int) -> set[float]:
    return set(group.allreduce(np.full(length, 10.0**group.rank)).tolist())


STEPPED_CALLS: dict[str, tuple[Callable[[Group], Any], Callable[[tuple[int, ...]], Any]]] = {
    "board": (lambda g: total(g, 4), lambda ranks: {sum(10.0**rank for rank in ranks)}),
    "large": (lambda g: total(g, LARGE), lambda ranks: {sum(10.0**rank for rank in ranks)}),
    "objects": (
        lambda g: g.allgather({"rank": g.rank}),
        lambda ranks: [{"rank": rank} if rank in ranks else None for rank in range(2)],
    ),
    "barrier": (lambda g: g.barrier(), lambda ranks: None),
    "fold": (lambda g: g.allreduce([g.rank], op=lambda a, b: a + b), list),
}
STRIDES = {"objects": 3, "fold": 5, "large": 2}  # of a call of hundreds of steps
FEW_STEPS = ("barrier", "board", "large")


# `make soak` interrupts a call at each of those steps.
SPARSE = [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.soak)]


def step_of(error: type[BaseException], stride: int) -> int:
    """Where the steps of this error begin: together the errors meet every `stride`-th step."""
    return [KeyboardInterrupt, Late, HopliteTimeoutError].index(error) * stride


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", STEPPED_CALLS)
@pytest.mark.parametrize("error", [KeyboardInterrupt, Late, HopliteTimeoutError])
@pytest.mark.parametrize("sparse", SPARSE)
def test_call_interrupted_at_any_step_ends_membership(
    both: Cluster, kind: str, rank: int, error: type[BaseException], sparse: int
) -> None:
    """The other rank's results have the part or not, as its contributors say, and the interrupted
    rank joins again at once. A step before the call begins, or when it is over, does not count."""
    call, right = STEPPED_CALLS[kind]
    name, ended = f"steps {kind} {rank} {error.__name__} {sparse}", 0
    stride = (min(sparse, 2) if kind in FEW_STEPS else sparse) * STRIDES.get(kind, 1)
    other = Other(both, name, 1 - rank, call)
    try:
        for at in itertools.count(step_of(error, stride), stride * 3):
            group = both.group(name, 2, rank, timeout=20)
            make = functools.partial(call, group)
            until_all_take_part(group, make)
            was_raised = raised_at(make, at, error)
            assert other.error is None
            if not group._member.closed:
                group.close()
            else:
                ended += 1
                words = f"because a call (timed out|ended by {error.__name__})"
                with pytest.raises(ClosedError, match=words):
                    group.barrier()
            if not was_raised:
                break
        assert ended > (5 if sparse == 1 else 1)
    finally:
        other.end()
    assert other.error is None
    for contributors, found in other.results:
        assert found == right(contributors)


def raising(error: BaseException) -> Callable[..., Any]:
    def raises(*_: Any) -> Any:
        raise error

    return raises


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("sparse", SPARSE)
def test_leave_interrupted_at_any_step_lets_the_rank_join_again(
    both: Cluster, background: bool, sparse: int
) -> None:
    """The second interruption of a call. To close the old Group later ends no new membership."""
    name, ended = f"second {background} {sparse}", 0
    other = Other(both, name, 1, lambda g: total(g, 4))
    try:
        for at in itertools.count(0, sparse):
            group = both.group(name, 2, 0, timeout=20)
            if background:
                group.allreduce_async(np.ones(4)).result(20)
            until_all_take_part(group, functools.partial(total, group, 4))
            group._calls._make = raising(KeyboardInterrupt())  # type: ignore[method-assign]

            def interrupted_twice(group: Group = group) -> None:
                with contextlib.suppress(KeyboardInterrupt):
                    group.barrier()

            was_raised = raised_at(interrupted_twice, at, Late)
            ended += group._member.closed
            if not group._member.closed:  # the second one came before the leave had begun
                group.close()
            with both.group(name, 2, 0, timeout=20) as again:
                until_all_take_part(again, functools.partial(total, again, 4))
                group.close()
                for _ in range(2):
                    total(again, 4)
                    assert again.contributors == (0, 1)
            if not was_raised:
                break
        least = 1 if background else 10
        assert ended > least // sparse  # the thread leaves, which is not traced
    finally:
        other.end()
    assert other.error is None


def end_by(group: Group, error: BaseException) -> None:
    """A call that ends by the error after its part was given."""
    group._calls._committed = raising(error)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        group.allgather({"rank": group.rank})


def test_rank_that_joins_again_at_once_is_never_told_that_it_is_taken(both: Cluster) -> None:
    other = Other(both, "at once", 1, lambda g: g.allgather({"rank": g.rank}))
    try:
        for turn in range(80):
            group = both.group("at once", 2, 0, timeout=20)
            if turn % 10 == 0:
                until_all_take_part(group, functools.partial(group.allgather, {"rank": 0}))
            end_by(group, KeyboardInterrupt())
    finally:
        other.end()
    assert other.error is None
    assert {contributors for contributors, _ in other.results} == {(0, 1), (1,)}


def lost(group: Group) -> str:
    """The text of the error of a call of a strict rank; "" if all ranks have taken part."""
    try:
        group.allgather({"rank": group.rank})
    except PeerLostError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Late(), HopliteTimeoutError("late")])
def test_strict_ranks_of_one_that_was_interrupted_get_an_error(
    both: Cluster, error: BaseException
) -> None:
    def body(group: Group) -> Any:
        group.barrier()
        if group.rank == 2:
            end_by(group, error)
            return None
        error_of_call = eventually(lambda: lost(group))
        assert "ranks [2] are lost" in error_of_call
        return group.contributors

    found = in_threads(both, f"strict {type(error).__name__}", 3, body, strict=True)
    assert found == [(0, 1), (0, 1), None]


def test_group_of_which_all_ranks_have_timed_out_begins_anew_at_call_0(both: Cluster) -> None:
    """One rank after the other makes the call, so each of them times out."""
    for _ in range(10):
        groups = [both.group("all late", 2, rank, timeout=20) for rank in range(2)]
        waits = groups[1].allgather_async(1)
        assert groups[0].allgather(0) == waits.result(20) == [0, 1]
        assert [group.calls for group in groups] == [1, 1]
        for group in groups:
            group._member.timeout = 0.01
        with pytest.raises(HopliteTimeoutError, match="This rank has left the Group"):
            groups[0].allgather(0)
        groups[1]._calls._committed = raising(HopliteTimeoutError("late"))  # type: ignore[method-assign]
        with pytest.raises(HopliteTimeoutError):
            groups[1].allgather(1)


def test_ranks_that_time_out_together_and_join_again_at_once_meet(both: Cluster) -> None:
    """One of them may join the old Group before the other one has left it."""
    for _ in range(10):
        both_wait = threading.Barrier(2)

        def body(group: Group, both_wait: threading.Barrier = both_wait) -> Any:
            until_all_take_part(group, functools.partial(group.allgather, group.rank))
            both_wait.wait(20)
            end_by(group, HopliteTimeoutError("late"))
            with both.group("together", 2, group.rank, timeout=20) as again:
                return until_all_take_part(again, functools.partial(again.allgather, again.rank))

        assert in_threads(both, "together", 2, body) == [[0, 1]] * 2


def test_group_that_does_not_fill_in_time_is_left_and_can_be_joined_again(both: Cluster) -> None:
    for _ in range(5):
        alone = both.group("does not fill", 2, 0, timeout=0.01)
        with pytest.raises(
            HopliteTimeoutError, match=r"1 of 2 members joined within timeout=0\.01 s"
        ):
            alone.barrier()
        with pytest.raises(ClosedError, match="this member has left, because a call timed out"):
            alone.barrier()
    found = in_threads(both, "does not fill", 2, lambda g: (g.allgather(g.rank), g.calls))
    assert found == [([0, 1], 1)] * 2


def test_messages_that_time_out_or_are_interrupted_leave_the_membership(both: Cluster) -> None:
    def body(group: Group) -> Any:
        group.barrier()
        for call in (group.recv, group.probe):
            with contextlib.suppress(HopliteTimeoutError):
                assert call(timeout=0) is None
        group.barrier()  # nothing was sent until here
        with pytest.raises(HopliteTimeoutError):
            group.sendrecv("early", 1 - group.rank, source=1 - group.rank, recv_tag=7, timeout=0.01)
        wait, group._member.wait = group._member.wait, raising(KeyboardInterrupt())  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            group.recv(1 - group.rank, tag=7)
        group._member.wait = wait  # type: ignore[method-assign]
        return group.recv(1 - group.rank), group.allgather(group.rank), group.calls

    assert in_threads(both, "messages", 2, body) == [("early", [0, 1], 3)] * 2


def write_after_calls_that_time_out(cluster: Cluster, rank: int, length: int) -> None:
    """Writes an array of the store as soon as a call has raised. The other rank's results have the
    whole array as it was, or nothing of it."""
    name = f"written after {rank} {length}"
    part = np.full(length, 10.0)
    other = Other(cluster, name, 1 - rank, lambda g: {*np.unique(g.allreduce(part)).tolist()})
    try:
        for turn in range(20):
            group = cluster.group(name, 2, rank, timeout=60)
            x = group.empty(length)
            x[:] = 1.0
            until_all_take_part(group, functools.partial(group.allreduce, x))
            limit_s = 0.001 * (1 + turn % 20)
            with contextlib.suppress(HopliteTimeoutError):
                while True:  # until a call is late, however fast this machine is
                    group._member.timeout = limit_s = 0.7 * limit_s
                    group.allreduce(x)
            x[:] = 1e9
    finally:
        other.end()
        assert other.error is None
    for contributors, found in other.results:
        assert found == {11.0 if contributors == (0, 1) else 10.0}
    assert {contributors for contributors, _ in other.results} <= {(0, 1), (1 - rank,)}


@pytest.mark.parametrize("rank", [0, 1])
def test_array_of_the_store_written_after_its_call_has_raised_changes_no_result(
    both: Cluster, rank: int
) -> None:
    write_after_calls_that_time_out(both, rank, 3 * MIB // 8)


@pytest.mark.parametrize("rank", [0, 1])
def test_array_read_in_place_and_written_after_its_call_has_raised_changes_no_result(
    rank: int,
) -> None:
    config = hoplite_mp.Config(group_buffer_bytes_max=0)
    with hoplite_mp.Cluster(workers=0, memory="512MiB", config=config) as cluster:
        write_after_calls_that_time_out(cluster, rank, 16 * MIB // 8)


GROUP = hoplite_mp.Group  # which tests replace


class InterruptedGroup:
    """In the place of the class: its constructor is interrupted as it begins or ends."""

    def __init__(self, moment: str) -> None:
        self.moment = moment

    def __call__(self, *about: Any) -> Any:
        if self.moment == "when it has joined":
            GROUP(*about)
        raise KeyboardInterrupt


MOMENTS = ["before it joins", "as it joins", "when it has joined"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_split_interrupted_after_its_commit_leaves_the_new_group_to_the_others(
    both: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """They do not wait for it for ever: it is a dead rank of the new Group."""
    interrupted = threading.Event()

    def body(group: Group) -> Any:
        group.barrier()
        if group.rank == 1:
            split_after_commit(group)
            return None
        of_peers = group._of_peers

        def late(*about: Any) -> Any:  # after the class has been replaced for the other rank only
            assert interrupted.wait(20)
            return of_peers(*about)

        group._of_peers = late  # type: ignore[method-assign]
        with group.split(0) as part:  # type: ignore[union-attr]
            return part.allgather(group.rank), part.contributors, part.size

    def split_after_commit(group: Group) -> None:
        try:
            with monkeypatch.context() as patch:
                if moment == "before it joins":
                    patch.setattr(group, "_of_peers", raising(KeyboardInterrupt()))
                else:
                    replaced = InterruptedGroup(moment)
                    patch.setattr("hoplite_mp._group.group.Group", replaced)
                with pytest.raises(KeyboardInterrupt):
                    group.split(0)
        finally:
            interrupted.set()
        with pytest.raises(ClosedError, match="because a call ended by KeyboardInterrupt"):
            group.split(0)

    found = in_threads(both, f"split interrupted {moment}", 3, body)
    assert found == [([0, None, 2], (0, 2), 3), None, ([0, None, 2], (0, 2), 3)]


@pytest.mark.parametrize("moment", MOMENTS[1:])
def test_join_that_is_interrupted_leaves_the_rank_free(
    both: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    for _ in range(10):
        with monkeypatch.context() as patch:
            patch.setattr("hoplite_mp._group.group.Group", InterruptedGroup(moment))
            with pytest.raises(KeyboardInterrupt):
                both.group("join interrupted", 1, 0)
        with both.group("join interrupted", 1, 0, timeout=20) as group:
            assert group.allgather(7) == [7]
