"""Arguments and results that do not load: the error keeps its type, and says what was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from hoplite_mp.errors import TaskError
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


class Odd(Exception):
    """Requires two arguments."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")
        self.code = code


def refuse(kind: type[BaseException], *args: Any) -> None:
    raise kind(*args)


class Unloadable:
    def __init__(self, kind: type[BaseException], *args: Any) -> None:
        self.loads = kind, *args

    def __reduce__(self) -> Any:
        return refuse, self.loads


def echo(value: Any, *_: Any) -> Any:
    return value


async def echo_async(value: Any) -> Any:
    return value


class Keeps:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def echo(self, value: Any) -> Any:
        return value


def text_of(error: BaseException | None) -> str:
    return "".join((str(error), *getattr(error, "__notes__", ())))


SENDS: dict[str, tuple[str, Callable[[Cluster, Any], Any]]] = {
    "submit": ("echo", lambda c, bad: c.submit(echo, bad)),
    "by name": ("echo", lambda c, bad: c.submit(echo, value=bad)),
    "beside a ref": ("echo", lambda c, bad: c.submit(echo, c.put(1), [bad])),
    "large": ("echo", lambda c, bad: c.submit(echo, [bad, bytes(1 << 20)])),
    "async": ("echo_async", lambda c, bad: c.submit(echo_async, bad)),
    "named": ("named", lambda c, bad: c.options(name="named").submit(echo, bad)),
    "call of an actor": ("Keeps.echo", lambda c, bad: c.actor(Keeps).echo(bad)),
    "constructor": ("Keeps", lambda c, bad: c.actor(Keeps, bad).echo(1)),
}


@pytest.mark.parametrize("how", SENDS)
def test_error_of_arguments_that_do_not_load_names_the_function(cluster: Cluster, how: str) -> None:
    name, send = SENDS[how]
    for kind, args in ((LookupError, ("why",)), (ModuleNotFoundError, ("why",)), (Odd, (7, "why"))):
        error = send(cluster, Unloadable(kind, *args)).exception(PATIENCE_S)
        assert type(error) is kind
        words = f"the arguments of {name}() could not be loaded: {kind.__name__}: why"
        assert words in text_of(error)
        assert "in refuse" in str(error.__cause__), "the traceback of the worker"
        assert not isinstance(error, Odd) or error.code == 7
    error = send(cluster, Unloadable(SystemExit, 3)).exception(PATIENCE_S)
    assert type(error) is TaskError
    assert str(error) == f"the arguments of {name}() could not be loaded: SystemExit: 3"


def raise_from(cause: type[BaseException]) -> None:
    raise TaskError("its own") from cause(3)


def test_task_error_that_a_task_raises_from_an_exit_arrives_as_itself(cluster: Cluster) -> None:
    error = cluster.submit(raise_from, SystemExit).exception(PATIENCE_S)
    assert type(error) is TaskError
    assert str(error) == "its own"


class Callee:
    """A function that does not load in a worker."""

    __name__ = "callee"

    def __call__(self) -> None: ...

    def __reduce__(self) -> Any:
        return refuse, (ModuleNotFoundError, "No module named 'far_away'")


def test_error_of_a_function_that_does_not_load_names_the_function(cluster: Cluster) -> None:
    error = cluster.submit(Callee()).exception(PATIENCE_S)
    assert type(error) is ModuleNotFoundError
    assert "the function callee() could not be loaded: ModuleNotFoundError: No module" in str(error)


def test_chunk_of_a_map_names_the_function(cluster: Cluster) -> None:
    items = [1, Unloadable(LookupError, "why"), 3]
    with pytest.raises(LookupError, match=r"the arguments of echo\(\) could not be loaded"):
        list(cluster.map(echo, items, chunksize=3))


def test_error_of_a_ref_among_the_arguments_is_raised_as_it_is(cluster: Cluster) -> None:
    failed = cluster.submit(refuse, KeyError, "its own")
    for argument in (failed, [failed.ref]):
        error = cluster.submit(echo, argument).exception(PATIENCE_S)
        assert type(error) is KeyError
        assert "could not be loaded" not in text_of(error)
    error = cluster.submit(echo, cluster.put(Unloadable(LookupError, "why"))).exception(PATIENCE_S)
    assert type(error) is LookupError
    assert "the value of ObjectRef" in text_of(error)
    assert "arguments" not in text_of(error)


@pytest.mark.parametrize("kind", [mock.Mock, mock.MagicMock])
def test_mock_as_function_gives_its_value_or_one_error_that_says_why(
    cluster: Cluster, kind: type[mock.Mock]
) -> None:
    assert cluster.submit(kind(return_value=3)).result(PATIENCE_S) == 3
    future = cluster.submit(kind())  # returns a Mock that belongs to the first one
    error = future.exception(PATIENCE_S)
    assert type(error) is RecursionError
    assert f"the result of {kind.__name__}() could not be loaded: RecursionError" in text_of(error)
    with pytest.raises(RecursionError, match=r"the value of ObjectRef.* could not be loaded"):
        cluster.get(future.ref)
    with pytest.raises(RecursionError, match=r"could not be loaded"):
        list(cluster.map(kind(), range(3), chunksize=1))
