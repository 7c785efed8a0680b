"""What travels with a function, and that it is what the function is at the call."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import hoplite_mp
from hoplite_mp import _serialize
from hoplite_mp._serialize import captured_globals
from tests.support.functions import add
from tests.support.processes import run_program
from tests.support.waiting import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


@dataclasses.dataclass
class Scale:
    factor: float

    def __call__(self, x: float) -> float:
        return self.factor * x

    def times(self, x: float) -> float:
        return self.factor * x


@dataclasses.dataclass(frozen=True)
class Equal:
    """Equal to others that do something else."""

    name: str
    power: int = dataclasses.field(compare=False)

    def __call__(self, x: int) -> int:
        return int(x**self.power)


def test_a_large_array_in_any_order_travels_with_its_function(cluster: Cluster) -> None:
    fortran = np.asfortranarray(np.arange(20_000.0).reshape(100, 200))
    for carrier in (functools.partial(np.dot, fortran), lambda v: fortran @ v, fortran.dot):
        found = cluster.submit(carrier, np.ones(200)).result(PATIENCE_S)
        assert (found == fortran.sum(axis=1)).all()


def test_every_kind_of_callable(cluster: Cluster) -> None:
    offset = 10
    local: list[tuple[Callable[..., Any], tuple[Any, ...], Any]] = [
        (lambda x: x + offset, (1,), 11),
        (functools.partial(add, 1, 2), (3,), 6),
        (Scale(2).times, (4,), 8),
        (Scale(3), (4,), 12),
        ("a-b".split, ("-",), ["a", "b"]),
        (complex, (1, 2), 1 + 2j),
        (Scale, (5,), Scale(5)),
        (operator.itemgetter(1), ([7, 8],), 8),
        (np.add, (1, 2), 3),
        (max, (3, 9), 9),
    ]
    for function, args, value in local:
        assert cluster.submit(function, *args).result(PATIENCE_S) == value


def test_a_state_that_changes_between_two_calls(cluster: Cluster) -> None:
    scale, items, factor = Scale(1), [1], 1

    def closes(x: int) -> int:
        return x * factor

    def looks() -> list[int]:
        return list(items)

    def through() -> int:
        return closes(10)

    times, held = scale.times, functools.partial(list, items)
    calls = (
        lambda: cluster.submit(scale, 10),
        lambda: cluster.submit(times, 10),
        lambda: cluster.submit(closes, 10),
        lambda: cluster.submit(through),
        lambda: cluster.submit(looks),
        lambda: cluster.submit(held),
    )
    assert [call().result(PATIENCE_S) for call in calls] == [10, 10, 10, 10, [1], [1]]
    scale.factor = factor = 2
    items.append(2)
    assert [call().result(PATIENCE_S) for call in calls] == [20, 20, 20, 20, [1, 2], [1, 2]]


def test_defaults_attributes_and_code_that_change(cluster: Cluster) -> None:
    def local(x: int = 1, *, y: int = 1) -> int:
        return x + y

    def other(x: int = 1, *, y: int = 1) -> int:
        return -x

    assert cluster.submit(local).result() == 2
    local.__defaults__ = (10,)
    assert cluster.submit(local).result() == 11
    local.__kwdefaults__ = {"y": 20}
    assert cluster.submit(local).result() == 30
    local.__code__ = other.__code__
    assert cluster.submit(local).result() == -10

    @functools.wraps(local)
    def counted() -> int:
        return counted.calls  # type: ignore[attr-defined]

    for number in (5, 6):
        counted.calls = number  # type: ignore[attr-defined]
        assert cluster.submit(counted).result() == number


def test_equal_callables_are_not_the_same(cluster: Cluster) -> None:
    square, cube = Equal("x", 2), Equal("x", 3)
    assert square == cube
    assert cluster.submit(square, 2).result() == 4
    assert cluster.submit(cube, 2).result() == 8


def test_globals_of_a_script_change(cluster: Cluster) -> None:
    out = run_program(
        """
        scale = 2
        def inner(x): return x * scale
        def outer(x): return inner(x) + 1
        with hoplite_mp.Cluster(workers=1) as c:
            say(c.submit(outer, 10).result())
            scale = 3
            say(c.submit(outer, 10).result())
            def inner(x): return -x
            say(c.submit(outer, 10).result(), c.submit(outer, 10).result())
        """
    )
    assert out.split() == ["21", "31", "-9", "-9"]


def closure(state: bool) -> tuple[Callable[[], bool], Callable[[bool], None]]:
    """A function that returns the variable of its closure, and one that binds the variable."""

    def look() -> bool:
        return state

    def bind(value: bool) -> None:
        nonlocal state
        state = value

    return look, bind


def toggled(where: str) -> tuple[Callable[[], bool], Callable[[bool], None]]:
    """A function that reads a variable, which is False, and one that binds the variable."""
    if where == "its closure":
        return closure(False)
    scope: dict[str, Any] = {"flag": False, "__name__": "a script"}
    exec("def look(): return flag\ndef look_through(): return helper()", scope)
    if where == "a global":
        return scope["look"], functools.partial(operator.setitem, scope, "flag")
    scope["helper"], bind = closure(False)
    return scope["look_through"], bind


TOGGLED = "a global", "its closure", "the closure of a global"


@pytest.mark.parametrize("where", TOGGLED)
def test_variable_bound_while_its_function_is_pickled_is_sent_with_the_next_call(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Another thread binds it and binds it back; what was sent does not stand for either state."""
    look, bind = toggled(where)
    original = _serialize.encode_out_of_band

    def meanwhile(*args: Any) -> Any:
        bind(True)
        encoded = original(*args)
        bind(False)
        return encoded

    with monkeypatch.context() as patch:
        patch.setattr(_serialize, "encode_out_of_band", meanwhile)
        cluster.submit(look).result(PATIENCE_S)
    assert cluster.submit(look).result(PATIENCE_S) is False


@pytest.mark.parametrize("where", TOGGLED)
def test_variable_bound_after_it_was_read_is_sent_as_it_was_read(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    look, bind = toggled(where)
    with monkeypatch.context() as patch:
        for name in ("variable" if where == "a global" else "cell", "mark_of"):
            original = getattr(captured_globals.Scan, name)

            def read(*args: Any, original: Any = original) -> Any:
                found = original(*args)
                bind(True)
                return found

            patch.setattr(captured_globals.Scan, name, read)
        assert cluster.submit(look).result(PATIENCE_S) is False
    bind(False)
    assert cluster.submit(look).result(PATIENCE_S) is False


def test_an_unchanged_function_travels_once(cluster: Cluster) -> None:
    factor = 3

    def helper(x: int) -> int:
        return x * factor

    def by_value(x: int) -> int:
        return helper(x) if x else by_value(x + 1)

    functions = cluster._runtime.submitter._functions
    sent = {functions.send(fn)[0] for _ in range(20) for fn in (by_value, add)}
    assert len(sent) == 2
    futures = [cluster.submit(fn, 1) for fn in (by_value, add) for _ in range(20)]
    assert [f.result(PATIENCE_S) for f in futures] == [3] * 20 + [1] * 20
    factor = 4
    assert functions.send(by_value)[0] not in sent
    assert functions.send(add)[0] in sent
    gone = weakref.ref(helper)
    del futures, helper, by_value
    import gc

    gc.collect()
    assert gone() is None


def test_large_closures_do_not_pile_up() -> None:
    """Functions made in a loop, each with an array of its own."""
    with hoplite_mp.Cluster(workers=1, memory="64MiB") as small:

        def make(n: int) -> Callable[[], float]:
            array = np.full(1 << 18, n, float)
            return lambda: float(array[-1])

        for n in range(80):
            assert small.submit(make(n)).result(PATIENCE_S) == n
        pid = small.submit(os.getpid).result()
        with open(f"/proc/{pid}/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 300 << 20
        assert small.stats()["bytes_spilled"] == 0


def test_refs_in_closures_and_in_callables(cluster: Cluster) -> None:
    before = cluster.stats()["objects"]
    futures = []
    for n in range(8):
        ref = cluster.put(np.full(50_000, n))
        futures.append(cluster.submit(lambda: int(hoplite_mp.current().get(ref)[-1])))  # noqa: B023
    del ref
    assert [future.result(PATIENCE_S) for future in futures] == list(range(8))
    del futures
    eventually(lambda: cluster.stats()["objects"] <= before)  # functions and arrays have gone
    held = functools.partial(lambda r: hoplite_mp.current().get(r), cluster.put("held"))
    assert cluster.submit(held).result(PATIENCE_S) == "held"


def test_what_cannot_travel_is_refused_at_the_call(cluster: Cluster) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="lock"):
        cluster.submit(abs, lock)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lock"):
        cluster.submit(lambda: lock)
    with pytest.raises(TypeError, match="lock"):
        cluster.map(abs, [lock], chunksize=1)  # type: ignore[list-item]
    assert cluster.submit(abs, -1).result(PATIENCE_S) == 1


def test_classes_of_a_script_come_home_as_themselves() -> None:
    out = run_program(
        """
        import dataclasses, enum, typing
        class Color(enum.Enum):
            RED = 1
        @dataclasses.dataclass
        class Point:
            x: int
            color: Color = Color.RED
            def moved(self): return Point(self.x + 1)
        class Trouble(Exception):
            def __init__(self, code): super().__init__(f"code {code}"); self.code = code
            def __reduce__(self): return Trouble, (self.code,)
        class Pair(typing.NamedTuple):
            a: int
        def trouble(): raise Trouble(5)
        def pair(p): return Pair(p.a + 1)
        def make(n): return [Point(n)] * 2
        with hoplite_mp.Cluster(workers=2) as c:
            moved = c.submit(Point.moved, Point(1)).result()
            say(type(moved) is Point, moved == Point(2), moved.color is Color.RED)
            a, b = c.submit(make, 3).result()
            say(a is b, c.submit(lambda p: p == Point(3), a).result())
            say(type(c.submit(pair, Pair(1)).result()) is Pair)
            try:
                c.submit(trouble).result()
            except Trouble as error:
                say(error.code)
            Point.moved = lambda self: Point(self.x - 1)
            say(c.submit(lambda: Point(5).moved().x).result())
        """
    )
    assert out.split() == ["True"] * 6 + ["5", "4"]
