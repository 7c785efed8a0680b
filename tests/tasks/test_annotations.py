"""Annotations of functions and classes by value, which Python 3.14 evaluates late (PEP 649)."""

from __future__ import annotations

import sys
import textwrap

import pytest

from tests.lan import forked
from tests.support.waiting import PATIENCE_S

SCRIPT = """
import dataclasses, enum, functools, inspect, typing
import hoplite_mp

class Plain:
    x: int
    y: "Plain"
    __slots__ = ()

class Open:
    z: list[int] = []
    @property
    def p(self) -> str: ...
    twice = functools.partialmethod(print, 1, end="")

class Pair(typing.NamedTuple):
    a: int
    b: str = ""

class Row(typing.TypedDict):
    key: int

class Color(enum.Enum):
    RED = 1
    extra: int

def function(a: int, *, b: Pair = None) -> Row: ...

def seen():
    class Made:
        n: int
        m: typing.ClassVar[int] = 3
    one = dataclasses.dataclass(Made)
    return (
        typing.get_type_hints(Plain), typing.get_type_hints(Open), Pair.__annotations__,
        Row.__annotations__, Color.__annotations__, typing.get_type_hints(function),
        inspect.signature(function), [f.name for f in dataclasses.fields(one)],
        type(vars(Open)["twice"]).__name__, vars(Open)["twice"].keywords,
    )

if __name__ == "__main__":
    with hoplite_mp.Cluster(1, memory="64MiB") as c:
        there, here = c.submit(seen).result(), seen()
        for one, other in zip(there, here, strict=True):
            assert str(one) == str(other), (one, other)
    print("equal")
"""
UNKNOWN = """
import typing
import hoplite_mp
if typing.TYPE_CHECKING:
    from nowhere import Missing

def function(x: Missing, y: int = 2, *, z: "Missing" = 3) -> Missing:
    return x + y + z

class Holder:
    held: Missing
    __slots__ = ("held",)
    def method(self, x: Missing): return x

def texts():
    try:
        Holder.__annotations__["held"] + 1
    except TypeError:
        pass
    return function.__annotations__, Holder.__annotations__, function.__kwdefaults__

if __name__ == "__main__":
    with hoplite_mp.Cluster(1, memory="64MiB") as c:
        assert c.submit(function, 1).result() == 6
        assert c.submit(lambda: Holder().method(4)).result() == 4
        of_function, of_class, defaults = c.submit(texts).result()
        assert set(of_function.values()) == {"Missing", "int"}, of_function
        assert of_class == {"held": "Missing"}
        assert defaults == {"z": 3}
        try:
            function.__annotations__
        except NameError:
            print("the program's own are as before")
"""


def output_of(script: str) -> str:
    done = forked.run([sys.executable, "-c", textwrap.dedent(script)], timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_annotations_in_a_task_are_those_of_the_script() -> None:
    assert output_of(SCRIPT) == "equal\n"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are evaluated at once")
def test_annotations_that_cannot_be_evaluated_travel_as_text() -> None:
    assert output_of(UNKNOWN) == "the program's own are as before\n"
