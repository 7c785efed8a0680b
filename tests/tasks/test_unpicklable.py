"""Errors of pickling name the global, attribute, closure or item that cannot be pickled."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp import _serialize
from tests.support.processes import run_program
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp import Cluster


class Holder:
    """Its instances are picklable as long as nobody gives them a lock."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)

    def call(self) -> None: ...


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


class Reduced:
    def __init__(self, part: Any) -> None:
        self.part = part

    def __reduce__(self) -> Any:
        return Reduced, (self.part,)


def scoped(code: str, **scope: Any) -> Callable[..., Any]:
    scope["__name__"] = "a script"
    exec(code, scope)
    made: Callable[..., Any] = scope["f"]
    return made


def closes_over(lock: Any) -> Callable[..., Any]:
    def inner() -> Any:
        return lock

    return lambda: inner()


def with_default(lock: Any) -> Callable[..., Any]:
    def f(a: int, b: int = 1, c: Any = lock, *, d: Any = 2) -> Any:
        return a, b, c, d

    return f


def with_keyword(lock: Any) -> Callable[..., Any]:
    def f(*, d: Any = lock) -> Any:
        return d

    return f


def with_attribute(lock: Any) -> Callable[..., Any]:
    f = closes_over(1)
    f.extra = lock  # type: ignore[attr-defined]
    return f


def local_class(lock: Any) -> Callable[..., Any]:
    class Local:
        shared = lock

    return Local


def local_metaclass(lock: Any) -> Callable[..., Any]:
    class Meta(type):
        shared = lock

    class Local(metaclass=Meta):
        __slots__ = ("a",)

    return Local


PLACES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "global": (
        lambda lock: scoped("def f(): return LOCK", LOCK=lock),
        "the global 'LOCK' of f() is a lock",
    ),
    "global of a global function": (
        lambda lock: scoped("def g(): return LOCK\ndef f(): return g()", LOCK=lock),
        "the global 'LOCK' of g() in the global 'g' of f() is a lock",
    ),
    "closure": (
        closes_over,
        "the variable 'lock' in the closure of inner() in the variable 'inner' in the closure of "
        "<lambda>() is a lock",
    ),
    "default": (with_default, "the default of the parameter 'c' of f() is a lock"),
    "keyword": (with_keyword, "the default of the parameter 'd' of f() is a lock"),
    "function attribute": (with_attribute, "the attribute 'extra' of <lambda>() is a lock"),
    "class attribute": (local_class, "the attribute 'shared' of class local_class.<locals>.Local"),
    "metaclass attribute": (
        local_metaclass,
        "the attribute 'shared' of class local_metaclass.<locals>.Meta in the metaclass "
        "local_metaclass.<locals>.Meta is a lock",
    ),
    "method": (
        lambda lock: Holder(lock=lock).call,
        "the attribute 'lock' of a Holder in the object of the method call() is a lock",
    ),
    "partial": (lambda lock: functools.partial(print, 1, lock), "argument 1 is a lock"),
    "partial keyword": (lambda lock: functools.partial(print, end=lock), "argument 'end' is a"),
    "attribute": (
        lambda lock: [{"a": Holder(part=Holder(lock=lock))}],
        "the attribute 'lock' of a Holder in the attribute 'part' of a Holder in item 'a' in "
        "item 0 is a lock",
    ),
    "slot": (lambda lock: Slotted(lock), "the attribute 'part' of a Slotted is a lock"),
    "reduced": (lambda lock: Reduced(lock), "an argument that makes a Reduced is a lock"),
}


@pytest.mark.parametrize("case", PLACES)
def test_error_of_pickling_names_the_place_and_a_remedy(case: str) -> None:
    make, said = PLACES[case]
    value = make(threading.Lock())
    for encode in (
        _serialize.encode,
        _serialize.encode_function,
        lambda one: _serialize.encode_call((one,), {}),
    ):
        if encode is _serialize.encode_function and not callable(value):
            continue
        with pytest.raises(TypeError) as caught:
            encode(value)
        assert said in str(caught.value)
        assert str(caught.value).endswith("or leave it out with `__getstate__`")


def test_value_that_itself_cannot_be_pickled_is_named_once() -> None:
    with pytest.raises(TypeError, match=r"^cannot pickle value of type 'lock': [^:]*$"):
        _serialize.encode(threading.Lock())


def test_class_of_a_compiled_metaclass_is_refused_with_one_reason() -> None:
    class Point(ctypes.Structure):
        _fields_ = (("x", ctypes.c_int),)

    for value in (Point, [Point]):
        with pytest.raises(TypeError) as caught:
            _serialize.encode(value)
        text = str(caught.value)
        assert "Point has a metaclass in compiled code, _ctypes.PyCStructType, so it" in text
        assert text.endswith("define it in a module that the workers can import")


def test_cyclic_and_large_values_are_searched_in_bounded_time() -> None:
    cycle: list[Any] = [1]
    cycle.append({"back": cycle, "lock": threading.Lock()})
    with pytest.raises(TypeError, match="item 'lock' in item 1 is a lock"):
        _serialize.encode(cycle)
    with pytest.raises(TypeError, match="cannot pickle"):
        _serialize.encode([[0] for _ in range(100_000)] + [threading.Lock()])


def give_holder() -> Any:
    return Holder(part={"lock": threading.Lock()})


def test_result_that_cannot_be_pickled_names_the_place(cluster: Cluster) -> None:
    with pytest.raises(
        TypeError, match="item 'lock' in the attribute 'part' of a Holder is a lock"
    ):
        cluster.submit(give_holder).result(PATIENCE_S)


def test_initializer_and_actor_that_cannot_be_pickled_name_the_global() -> None:
    out = run_program(
        """
        lock = threading.Lock()
        def init(): lock.acquire()
        class Actor:
            def look(self): return lock
        c = hoplite_mp.Cluster(workers=1)
        for call in (
            lambda: c.executor(1, initializer=init).submit(int).result(),
            lambda: c.actor(Actor), lambda: c.spmd(init, 1), lambda: c.map(init, [1]),
        ):
            try: call()
            except TypeError as error: say(str(error).partition(": ")[2].partition(";")[0])
        c.shutdown()
        """
    )
    assert [line.partition(": ")[2] for line in out.splitlines()] == [
        "the global 'lock' of init() is a lock",
        "the global 'lock' of Actor.look() in the attribute 'look' of class Actor is a lock",
        "the global 'lock' of init() is a lock",
        "the global 'lock' of init() is a lock",
    ]
