"""What a user's script defines: it travels by value, since readers never import `__main__`."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from tests.support.processes import run_python

# What a user's script defines; `check(decoded)` below is run in another process.
SCRIPT = """
import dataclasses, enum, functools, sys, typing
import numpy as np
from hoplite_mp import _serialize as serial
from hoplite_mp._common.ref import ObjectRef

SCALE = 3
def scaled(x): return x * SCALE
def factorial(n): return 1 if n < 2 else n * factorial(n - 1)
@functools.lru_cache(maxsize=None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def adder(a):
    def outer(b):
        def inner(c): return a + b + c
        return inner
    return outer
class Base:
    count = 0
    def __init__(self, x): self.x = x
    def double(self): return 2 * self.x
    @classmethod
    def make(cls): return cls(5)
    @staticmethod
    def three(): return 3
    @property
    def square(self): return self.x ** 2
class Derived(Base):
    __slots__ = ("slot",)
    def double(self): return super().double() + 1
class Colour(enum.Enum):
    RED = 1
    BLUE = 2
@dataclasses.dataclass
class Data:
    array: np.ndarray
    ref: ObjectRef
class Named(typing.NamedTuple):
    x: int
class Wrong(Exception):
    def __init__(self, code): super().__init__(code); self.code = code
T = typing.TypeVar("T")
P = typing.ParamSpec("P")
UserId = typing.NewType("UserId", int)
value = {
    "scaled": scaled, "lambda": lambda x: x + SCALE, "factorial": factorial, "fib": fib,
    "even": even, "adder": adder(1)(10), "Derived": Derived, "instance": Derived(4),
    "bound": Base(6).double, "partial": functools.partial(scaled, 5), "colour": Colour.BLUE,
    "data": Data(np.arange(1000), ObjectRef(bytes(16))), "named": Named(8), "T": T, "P": P,
    "UserId": UserId, "module": np,
}
"""


class TestMain:
    def test_values_by_value(self, tmp_path):
        path = tmp_path / "payload"
        run_python(SCRIPT + "open(sys.argv[1], 'wb').write(serial.encode(value).tobytes())\n", path)
        run_python(
            """
            import sys
            import numpy as np
            from hoplite_mp import _serialize as serial
            from hoplite_mp._common.ref import ObjectRef

            mem = memoryview(open(sys.argv[1], "rb").read())
            v = serial.decode(mem, make_ref=ObjectRef)
            assert v["scaled"](5) == 15 and v["lambda"](1) == 4 and v["partial"]() == 15
            assert v["factorial"](5) == 120 and v["fib"](30) == 832040 and v["even"](10)
            assert v["fib"].cache_info().maxsize is None
            assert v["adder"](100) == 111
            cls = v["Derived"]
            assert cls.make().double() == 11 and cls.three() == 3 and cls(3).square == 9
            assert type(v["instance"]) is cls and v["instance"].double() == 9 and v["bound"]() == 12
            assert v["colour"].name == "BLUE" and type(v["colour"])(2) is v["colour"]
            assert v["data"].array[7] == 7 and not v["data"].array.flags.writeable
            assert v["data"].ref == ObjectRef(bytes(16)) and v["named"].x == 8
            assert v["T"].__name__ == "T" and v["P"].__name__ == "P" and v["UserId"](3) == 3
            assert v["module"] is np
            assert not hasattr(sys.modules["__main__"], "scaled")
            """,
            path,
        )

    @pytest.mark.parametrize("name", ["scaled", "lambda", "fib", "adder", "bound", "partial"])
    def test_functions_by_value(self, tmp_path, name):
        path = tmp_path / "function"
        run_python(
            SCRIPT + "open(sys.argv[1], 'wb').write(serial.encode_function(value[sys.argv[2]]))\n",
            path,
            name,
        )
        data = path.read_bytes()
        assert callable(_serialize.decode_function(data))
        displayed = {"lambda": "<lambda>", "adder": "inner", "bound": "Base.double"}
        assert _serialize.function_name(data) == displayed.get(
            name, name.replace("partial", "scaled")
        )

    def test_exceptions_by_value(self, tmp_path):
        path = tmp_path / "error"
        run_python(
            SCRIPT
            + "open(sys.argv[1], 'wb').write(serial.encode_error(Wrong(7), 'text').tobytes())\n",
            path,
        )
        exc: Any = _serialize.decode_error(memoryview(path.read_bytes()), ObjectRef)
        assert type(exc).__name__ == "Wrong"
        assert exc.code == 7

    def test_a_class_that_comes_home_is_itself_and_unchanged(self, tmp_path):
        run_python(
            SCRIPT
            + """
import subprocess
there, back = sys.argv[1:]
open(there, "wb").write(serial.encode([Derived(4)]).tobytes())
Base.count = 99
subprocess.run([sys.executable, "-c", '''
import sys
from hoplite_mp import _serialize as serial
from hoplite_mp._common.ref import ObjectRef
there, back = sys.argv[1:]
value = serial.decode(memoryview(open(there, "rb").read()), make_ref=ObjectRef)
assert type(value[0]).count == 0
value[0].x = 50
open(back, "wb").write(serial.encode(value).tobytes())
''', there, back], check=True)
(home,) = serial.decode(memoryview(open(back, "rb").read()), make_ref=ObjectRef)
assert type(home) is Derived and home.double() == 101 and Base.count == 99
""",
            tmp_path / "there",
            tmp_path / "back",
        )

    def test_an_instance_that_pickles_as_a_name_is_refused(self):
        out = run_python(
            """
            from hoplite_mp import _serialize as serial
            class Missing:
                def __reduce__(self): return "MISSING"
            MISSING = Missing()
            try:
                serial.encode([MISSING])
            except TypeError as error:
                print(error)
            """
        )
        assert "'MISSING', which readers cannot import from __main__" in out

    @pytest.mark.usefixtures("as_users_start_them")
    def test_plain_values_do_not_import_cloudpickle(self):
        out = run_python(
            """
            import sys, json, collections, decimal
            import numpy as np
            from hoplite_mp import _serialize as serial
            from hoplite_mp._common.ref import ObjectRef
            for value in (1, [np.zeros(5000)], {"f": json.dumps, "c": collections.OrderedDict},
                          decimal.Decimal(1), type(None), np.add, np.float32, len, ValueError("x")):
                serial.decode(memoryview(serial.encode(value).tobytes()), make_ref=ObjectRef)
            serial.decode_function(serial.encode_function(json.dumps))
            serial.encode_call(([ObjectRef(bytes(16))],), {"x": np.zeros(3)})
            serial.encode_error(ValueError("x"), "")
            print("cloudpickle" in sys.modules)
            """
        )
        assert out.split() == ["False"]
