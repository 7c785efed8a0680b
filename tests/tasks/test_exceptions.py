"""Exceptions whose classes refuse attributes, or that end programs: what a caller gets, and that
the worker goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import TaskError
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._serialize import RemoteTraceback
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from hoplite_mp import Cluster


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    key: str


class Refusing(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"no attribute {name}")


class Unreadable(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"not to be read: {name}")


class NoText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Redefining(Exception):
    __traceback__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __cause__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    __dict__ = property(lambda self: 1 / 0)  # type: ignore[assignment]
    args = property(lambda self: 1 / 0)  # type: ignore[assignment]


class ExitsInText(Exception):
    def __str__(self) -> str:
        sys.exit(3)


class ExitsInReduce(Exception):
    def __reduce__(self) -> Any:
        sys.exit(3)


class ExitsWhenLoaded(Exception):
    def __reduce__(self) -> Any:
        return sys.exit, (3,)


class Empty(Exception):
    """False, because it has no items."""

    def __len__(self) -> int:
        return 0


class NeitherTrueNorFalse(Exception):
    def __bool__(self) -> bool:
        raise RuntimeError("no truth")


class Quits(BaseException):
    """In a reducer or a text: no Exception, and none that ends programs."""


class QuitsInReduce(Exception):
    def __reduce__(self) -> Any:
        raise Quits


KINDS = [
    Frozen, Refusing, Unreadable, NoText, Redefining, ExitsInText, ExitsInReduce, ExitsWhenLoaded,
    QuitsInReduce, Empty, NeitherTrueNorFalse,
]  # fmt: skip


def fail(kind: type[BaseException], *args: Any) -> None:
    raise kind(*(args or ("k",)))


async def fail_later(kind: type[BaseException]) -> None:
    await asyncio.sleep(0)
    raise kind("k")


def items(kind: type[BaseException]) -> Iterator[int]:
    yield 1
    raise kind("k")


async def later_items(kind: type[BaseException]) -> AsyncIterator[int]:
    yield 1
    raise kind("k")


def no_items(kind: type[BaseException]) -> Iterator[int]:
    raise kind("k")


def nested(kind: type[BaseException]) -> None:
    hoplite_mp.current().submit(fail, kind).result()


def nested_later(kind: type[BaseException]) -> None:
    for _ in range(4):  # with one worker or two, at least one of them runs inside this task
        error = hoplite_mp.current().submit(fail_later, kind).exception()
        assert error is not None
    hoplite_mp.current().submit(fail_later, kind).result()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def fail(self, kind: type[BaseException]) -> None:
        self.count += 1
        raise kind("k")

    async def fail_later(self, kind: type[BaseException]) -> None:
        self.count += 1
        raise kind("k")

    def get(self) -> int:
        return self.count


def read_all(stream: Any) -> None:
    for ref in stream:
        hoplite_mp.current().get(ref)


WAYS: dict[str, Callable[[Cluster, type[BaseException]], Any]] = {
    "task": lambda c, kind: c.submit(fail, kind).result(PATIENCE_S),
    "get": lambda c, kind: c.get(c.submit(fail, kind), timeout=PATIENCE_S),
    "async task": lambda c, kind: c.submit(fail_later, kind).result(PATIENCE_S),
    "map": lambda c, kind: list(c.map(fail, [kind] * 3, timeout=PATIENCE_S)),
    "chunks": lambda c, kind: list(c.map(fail, [kind] * 3, chunksize=3, timeout=PATIENCE_S)),
    "stream": lambda c, kind: read_all(c.stream(items, kind)),
    "async stream": lambda c, kind: read_all(c.stream(later_items, kind)),
    "stream at once": lambda c, kind: read_all(c.stream(no_items, kind)),
    "nested": lambda c, kind: c.submit(nested, kind).result(PATIENCE_S),
    "nested async": lambda c, kind: c.submit(nested_later, kind).result(PATIENCE_S),
    "argument": lambda c, kind: c.submit(abs, c.submit(fail, kind)).result(PATIENCE_S),
}


@pytest.mark.parametrize("kind", KINDS)
def test_exception_class_with_hostile_methods_reaches_the_caller(
    cluster: Cluster, kind: type[BaseException]
) -> None:
    lost = cluster.stats()["workers_lost"]
    for way, call in WAYS.items():
        with pytest.raises(BaseException) as caught:  # noqa: PT011  # of every kind
            call(cluster, kind)
        assert type(caught.value) is kind, way
        cause = vars(BaseException)["__cause__"].__get__(caught.value)
        assert type(cause) is RemoteTraceback, way
    for actor in (cluster.actor(Counter), cluster.options(concurrency=2).actor(Counter)):
        for method in (actor.fail, actor.fail_later):
            assert type(method(kind).exception(PATIENCE_S)) is kind
        assert actor.get().result(PATIENCE_S) == 2
    assert cluster.stats()["workers_lost"] == lost


def test_reduction_without_enough_sources_names_the_first_failure(cluster: Cluster) -> None:
    failed = [cluster.submit(fail, NeitherTrueNorFalse) for _ in range(2)]
    cluster.wait(failed)
    refs = [*(future.ref for future in failed), cluster.put(1)]
    with pytest.raises(hoplite_mp.ReduceError, match="the first failure: NeitherTrueNorFalse"):
        cluster.get(cluster.reduce(refs, max, num=3), timeout=PATIENCE_S)


class Hostile:
    """A value whose reducer raises one of them."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        raise self.kind("k")


@pytest.mark.parametrize("kind", [Frozen, Refusing, Unreadable, NoText, Redefining])
def test_reducer_that_raises_such_an_exception_is_reported(
    cluster: Cluster, kind: type[BaseException]
) -> None:
    with pytest.raises(TypeError, match="cannot pickle argument 0 of type 'Hostile'"):
        cluster.submit(id, Hostile(kind))
    with pytest.raises(TypeError, match="cannot pickle value of type 'Hostile'"):
        cluster.put(Hostile(kind))
    assert type(cluster.submit(Hostile, kind).exception(PATIENCE_S)) is kind
    with pytest.raises(kind):
        read_all(cluster.stream(lambda: iter([Hostile(kind)])))


def test_error_of_a_call_with_unreadable_arguments_is_no_interruption() -> None:
    def fails(one: object, two: object) -> None:
        raise ValueError

    with pytest.raises(ValueError) as caught:  # noqa: PT011 - no message
        fails(Unreadable("k"), Unreadable("k"))
    assert not is_interruption(caught.value)


# -- exceptions that end programs ---------------------------------------------------------------

EXITS = [SystemExit, KeyboardInterrupt, GeneratorExit]


@pytest.mark.parametrize("kind", EXITS)
def test_exit_in_a_task_is_the_cause_of_a_task_error(
    cluster: Cluster, kind: type[BaseException]
) -> None:
    lost = cluster.stats()["workers_lost"]
    for way, call in WAYS.items():
        with pytest.raises(TaskError, match=f"raised {kind.__name__}: k") as caught:
            call(cluster, kind)
        cause = caught.value.__cause__
        assert type(cause) is kind, way
        assert cause.args == ("k",)
        assert type(cause.__cause__) is RemoteTraceback
    actor = cluster.actor(Counter)
    for method in (actor.fail, actor.fail_later):
        error = method(kind).exception(PATIENCE_S)
        assert type(error) is TaskError
        assert type(error.__cause__) is kind
    assert actor.get().result(PATIENCE_S) == 2
    assert cluster.stats()["workers_lost"] == lost


@pytest.mark.parametrize("kind", EXITS)
def test_executor_raises_exits_of_tasks_as_they_are(kind: type[BaseException]) -> None:
    with hoplite_mp.Executor(max_workers=1) as pool:
        assert type(pool.submit(fail, kind).exception(PATIENCE_S)) is kind
        with pytest.raises(kind):
            list(pool.map(fail, [kind], timeout=PATIENCE_S))
        if kind is not KeyboardInterrupt:  # that one may be a Ctrl-C of the user
            assert type(pool.submit(id, Hostile(kind)).exception(PATIENCE_S)) is kind


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit])
def test_exit_in_a_reducer_is_the_cause_of_a_task_error(
    cluster: Cluster, kind: type[BaseException]
) -> None:
    value = Hostile(kind)
    for call in (
        lambda: cluster.submit(id, value),
        lambda: cluster.submit(id, key=value),
        lambda: cluster.put(value),
        lambda: cluster.submit(lambda: value),
        lambda: cluster.submit(value.__reduce__),
        lambda: cluster.actor(list, [value]),
        lambda: list(cluster.map(id, [value])),
    ):
        with pytest.raises(TaskError, match=f"cannot pickle .* raised {kind.__name__}") as caught:
            call()
        assert type(caught.value.__cause__) is kind
        assert isinstance(caught.value, TypeError)  # as of other values that do not pickle
    error = cluster.submit(Hostile, kind).exception(PATIENCE_S)
    assert type(error) is TaskError
    assert type(error.__cause__) is kind


def test_error_of_an_exit_without_a_text_ends_with_its_name(cluster: Cluster) -> None:
    def exits() -> None:
        raise GeneratorExit

    class Exits:
        def __reduce__(self) -> Any:
            raise GeneratorExit

    for call in (
        lambda: cluster.submit(id, Exits()),
        lambda: cluster.put(Exits()),
        lambda: cluster.submit(Exits().__reduce__),
    ):
        with pytest.raises(TaskError, match=r"it raised GeneratorExit$"):
            call()
    assert str(cluster.submit(exits).exception(PATIENCE_S)) == "the task raised GeneratorExit"


class LoadsBadly:
    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        return fail, (self.kind, "why")


def test_error_of_a_value_that_does_not_load_names_the_value(cluster: Cluster) -> None:
    for kind in (TypeError, Frozen, ModuleNotFoundError):
        future = cluster.submit(LoadsBadly, kind)
        error = future.exception(PATIENCE_S)
        assert type(error) is kind
        text = "".join((str(error), *getattr(error, "__notes__", ())))
        assert "the result of LoadsBadly() could not be loaded" in text
        assert "why" in text
        with pytest.raises(kind) as caught:
            cluster.get(future.ref)
        text = "".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
        assert "could not be loaded" in text
    error = cluster.submit(LoadsBadly, SystemExit).exception(PATIENCE_S)
    assert type(error) is TaskError
    assert type(error.__cause__) is SystemExit
    assert "could not be loaded" in str(error)
    with pytest.raises(TaskError, match="could not be loaded"):
        cluster.get(cluster.submit(LoadsBadly, SystemExit))


# -- exceptions within exceptions ---------------------------------------------------------------


class Two(Exception):
    """Requires two arguments, and leaves one to its base."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")
        self.code, self.what = code, what


class OfSystem(OSError):
    def __init__(self, *, number: int) -> None:
        super().__init__(number, "text", "file")


class Holder(Exception):
    def __init__(self, inner: BaseException) -> None:
        super().__init__("holds")
        self.inner = inner


def group() -> ExceptionGroup[Exception]:
    inner = ExceptionGroup("inner", [OfSystem(number=5), Frozen("f")])
    return ExceptionGroup("outer", [Two(7, "two"), inner, Refusing("r")])


def raise_it(make: Callable[[], BaseException]) -> None:
    raise make()


def check_group(found: Any) -> None:
    two, inner, refusing = found.exceptions
    assert (type(two), two.args, two.code, two.what) == (Two, ("two (7)",), 7, "two")
    of_system, frozen = inner.exceptions
    assert (type(of_system), of_system.errno, of_system.filename) == (OfSystem, 5, "file")
    assert (type(frozen), frozen.key, type(refusing)) == (Frozen, "f", Refusing)


def test_members_of_an_exception_group_keep_their_types(cluster: Cluster) -> None:
    with pytest.raises(ExceptionGroup, match="outer") as caught:
        cluster.submit(raise_it, group).result(PATIENCE_S)
    check_group(caught.value)
    check_group(cluster.submit(group).result(PATIENCE_S))
    check_group(cluster.get(cluster.put([group()]))[0])
    assert cluster.submit(lambda one: type(one.exceptions[0]) is Two, group()).result(PATIENCE_S)


def test_exceptions_in_attributes_keep_their_types(cluster: Cluster) -> None:
    for value in (
        cluster.submit(raise_it, lambda: Holder(Two(1, "x"))).exception(PATIENCE_S),
        cluster.submit(lambda: Holder(Two(1, "x"))).result(PATIENCE_S),
    ):
        assert type(value) is Holder
        assert (type(value.inner), value.inner.code) == (Two, 1)
    loop = Holder(ValueError())
    loop.inner = loop
    back: Any = cluster.get(cluster.put(loop))
    assert back.inner is back


def unpicklable_members() -> ExceptionGroup[Exception]:
    return ExceptionGroup("some", [Two(1, "x"), ValueError(threading.Lock()), KeyError("k")])


def test_member_that_does_not_pickle_costs_only_itself(cluster: Cluster) -> None:
    error: Any = cluster.submit(raise_it, unpicklable_members).exception(PATIENCE_S)
    assert type(error) is ExceptionGroup
    assert list(map(type, error.exceptions)) == [Two, TaskError, KeyError]
    assert "ValueError" in str(error.exceptions[1])
    error = cluster.submit(raise_it, lambda: Holder(ExitsInReduce("x"))).exception(PATIENCE_S)
    assert (type(error), type(error.inner)) == (Holder, ExitsInReduce)


# -- StopIteration ------------------------------------------------------------------------------


def test_stop_iteration_does_not_end_loops_in_silence(cluster: Cluster) -> None:
    for kind in (StopIteration, StopAsyncIteration):
        assert type(cluster.submit(fail, kind).exception(PATIENCE_S)) is kind
        with pytest.raises(RuntimeError, match=f"no_items.. raised {kind.__name__}") as caught:
            list(cluster.stream(no_items, kind))
        assert type(caught.value.__cause__) is kind
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(cluster.map(fail, [StopIteration]))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(cluster.map(fail, [StopIteration] * 4, chunksize=2))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(cluster.stream(lambda: iter([1, Hostile(StopIteration)])))


def test_worker_and_state_survive_a_reducer_that_interrupts(cluster: Cluster) -> None:
    pid = cluster.submit(os.getpid).result(PATIENCE_S)
    assert pid
    error = cluster.submit(Hostile, KeyboardInterrupt).exception(PATIENCE_S)
    assert type(error) is TaskError
