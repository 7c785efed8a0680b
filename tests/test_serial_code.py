"""Code by reference and by value, and failures: what travels, and what a reader makes of it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
import os
import subprocess
import sys
import textwrap
import threading
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hoplite_mp import serial, serial_code
from hoplite_mp.errors import TaskError
from hoplite_mp.ref import ObjectRef
from hoplite_mp.serial import ERROR

ROOT = Path(serial.__file__).parents[1]


def round_trip(value: Any) -> Any:
    return serial.decode(memoryview(serial.encode(value).tobytes()), make_ref=ObjectRef)


def function_trip(function: Any) -> Any:
    return serial.decode_function(serial.encode_function(function))


def error_trip(exc: BaseException, text: str | None = "the text") -> BaseException:
    encoded = serial.encode_error(exc, text)
    assert encoded.kind == ERROR
    return serial.decode_error(memoryview(encoded.tobytes()), ObjectRef)


def run_python(source: str, *args: Any) -> str:
    """Run `source` as a `__main__` of its own."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def importable_function(x: int) -> int:
    return x + 1


class ImportableClass:
    class Inner:
        def method(self) -> int:
            return 7


# What a user's script defines; `check(decoded)` below is run in another process.
SCRIPT = """
import dataclasses, enum, functools, sys, typing
import numpy as np
from hoplite_mp import serial
from hoplite_mp.ref import ObjectRef

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
            from hoplite_mp import serial
            from hoplite_mp.ref import ObjectRef

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
        assert callable(serial.decode_function(data))
        displayed = {"lambda": "<lambda>", "adder": "inner", "bound": "Base.double"}
        assert serial.function_name(data) == displayed.get(name, name.replace("partial", "scaled"))

    def test_exceptions_by_value(self, tmp_path):
        path = tmp_path / "error"
        run_python(
            SCRIPT
            + "open(sys.argv[1], 'wb').write(serial.encode_error(Wrong(7), 'text').tobytes())\n",
            path,
        )
        exc: Any = serial.decode_error(memoryview(path.read_bytes()), ObjectRef)
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
from hoplite_mp import serial
from hoplite_mp.ref import ObjectRef
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
            from hoplite_mp import serial
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

    def test_plain_values_do_not_import_cloudpickle(self):
        out = run_python(
            """
            import sys, json, collections, decimal
            import numpy as np
            from hoplite_mp import serial
            from hoplite_mp.ref import ObjectRef
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


class TestByReference:
    @pytest.mark.parametrize(
        "obj",
        [
            importable_function,
            ImportableClass,
            ImportableClass.Inner,
            json.dumps,
            len,
            np.add,
            np.float32,
            type(None),
            types.FunctionType,
            np.dtype("f8"),
            Any,
            int,
        ],
    )
    def test_comes_back_as_itself(self, obj):
        out = round_trip([obj])[0]
        assert out is obj or out == obj
        if callable(obj) and obj is not Any:
            assert function_trip(obj) is obj

    def test_what_counts_as_importable(self):
        assert serial_code.importable(importable_function)
        assert serial_code.importable(ImportableClass.Inner)
        assert not serial_code.importable(lambda: 0)
        assert not serial_code.importable(functools.partial(len))
        replaced = types.FunctionType(
            importable_function.__code__, globals(), "importable_function"
        )
        assert not serial_code.importable(replaced)

    def test_bound_methods(self):
        assert function_trip(ImportableClass.Inner().method)() == 7


class TestByValue:
    def test_lambdas_and_closures_over_closures(self):
        def level(a: int) -> Any:
            return lambda b: lambda c: [a, b, c]

        assert function_trip(level(1)(2))(3) == [1, 2, 3]
        assert round_trip(level)(1)(2)(3) == [1, 2, 3]

    def test_recursive_closure(self):
        def down(n: int) -> int:
            return 0 if n == 0 else down(n - 1)

        assert function_trip(down)(5) == 0

    def test_local_classes_with_super_and_slots(self):
        class Base:
            def hello(self) -> str:
                return "base"

        class Local(Base):
            __slots__ = ("x",)

            def hello(self) -> str:
                return super().hello() + "+local"

        value = Local()
        value.x = 3
        out = round_trip([value])[0]
        assert out.hello() == "base+local"
        assert out.x == 3
        assert type(out) is Local  # In the process that defined it.

    def test_local_enum_and_dataclass(self):
        class Colour(enum.Enum):
            RED = 1

        @dataclasses.dataclass(frozen=True)
        class Data:
            x: Any

        assert round_trip([Colour.RED])[0] is Colour.RED
        assert round_trip(Data(np.arange(3))).x.tolist() == [0, 1, 2]

    def test_arrays_and_refs_beside_code_stay_beside_the_stream(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        array = np.zeros(10_000)
        encoded = serial.encode([lambda: ref, array])
        assert encoded.refs == [ref]
        assert [b.nbytes for b in encoded.buffers] == [80_000]
        function, out = serial.decode(memoryview(encoded.tobytes()), make_ref=ObjectRef)
        assert function() == ref
        assert not out.flags.writeable

    def test_refs_in_the_closure_of_a_call(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        encoded = serial.encode_call(([ref], lambda: ref), {})
        assert encoded.dependencies == [ref]
        (values, function), _ = serial.decode_call(
            memoryview(encoded.tobytes()), ObjectRef, lambda ref: "value"
        )
        assert values == ["value"]
        assert function() == ref

    def test_refs_and_arrays_in_the_closure_of_a_task(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        array = np.arange(5000)
        array.flags.writeable = False
        out_ref, out = function_trip(lambda: (ref, array))()
        assert out_ref == ref
        assert out.tolist() == array.tolist()

    def test_cached_functions_keep_their_parameters(self):
        @functools.lru_cache(maxsize=7, typed=True)
        def cached(n: int) -> int:
            return n if n < 2 else cached(n - 1) + cached(n - 2)

        out = function_trip(cached)
        assert out(20) == 6765
        assert out.cache_parameters() == {"maxsize": 7, "typed": True}

    def test_names_of_typing(self):
        local = typing.TypeVar("local", bound=int)
        assert round_trip([local])[0].__bound__ is int
        identity = typing.NewType("identity", str)
        assert round_trip([identity])[0].__supertype__ is str

    def test_registered_modules(self, tmp_path, monkeypatch):
        (tmp_path / "byvalue.py").write_text(
            "OFFSET = 2\nclass Thing:\n    def f(self): return g(1)\ndef g(x): return x + OFFSET\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(serial_code, "_by_value_modules", {})
        import byvalue  # type: ignore[import-not-found]

        assert round_trip([byvalue.g])[0] is byvalue.g
        serial.register_pickle_by_value(byvalue)
        try:
            payload = serial.encode([byvalue.g, byvalue.Thing()]).tobytes()
            data = serial.encode_function(byvalue.g)
        finally:
            sys.modules["cloudpickle"].unregister_pickle_by_value(byvalue)
        (tmp_path / "payload").write_bytes(payload)
        (tmp_path / "function").write_bytes(data)
        run_python(
            """
            import sys
            from hoplite_mp import serial
            from hoplite_mp.ref import ObjectRef
            mem = memoryview(open(sys.argv[1] + "/payload", "rb").read())
            function, thing = serial.decode(mem, make_ref=ObjectRef)
            assert function(1) == 3 and thing.f() == 3 and "byvalue" not in sys.modules
            assert serial.decode_function(open(sys.argv[1] + "/function", "rb").read())(4) == 6
            """,
            tmp_path,
        )

    def test_registering_needs_an_imported_module(self):
        with pytest.raises(TypeError, match="expected a module"):
            serial.register_pickle_by_value("numpy")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"sys\.modules"):
            serial.register_pickle_by_value(types.ModuleType("never_imported"))

    def test_what_only_cloudpickle_can_do(self):
        assert list(round_trip([{"a": 1}.keys()])[0]) == ["a"]
        assert round_trip(types.MappingProxyType({"a": 1}))["a"] == 1

    def test_display_names(self):
        class Local:
            def method(self) -> None: ...

            def __call__(self) -> None: ...

        def name(function: Any) -> str:
            return serial.function_name(memoryview(serial.encode_function(function)))

        assert name(importable_function) == "importable_function"
        assert name(Local.method) == "Local.method"
        assert name(functools.partial(functools.partial(len))) == "len"
        assert name(lambda: 0) == "<lambda>"
        assert name(Local()) == "Local"
        assert name(operator.itemgetter(1)) == "itemgetter"
        odd = types.FunctionType(importable_function.__code__, {})
        odd.__qualname__ = "é" * 300
        assert set(name(odd)) <= {"é", "\ufffd"}

    def test_an_unpicklable_function(self):
        lock = threading.Lock()
        with pytest.raises(TypeError, match=r"cannot pickle the function .*lambda.*lock"):
            serial.encode_function(lambda: lock)


class OddInit(Exception):
    def __init__(self, a: Any, *, b: Any) -> None:
        super().__init__(f"{a} and {b}")
        self.a, self.b = a, b


class NoPickle(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())


class LockInside(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code, self.lock = code, threading.Lock()


class NoReduce(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("no")


class NoLoad(Exception):
    loads = True

    def __new__(cls, *args: Any) -> NoLoad:
        if not cls.loads:
            raise RuntimeError("this process cannot")
        return super().__new__(cls, *args)


class NoText(Exception):
    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no text")


class BadSocket(OSError):
    def __init__(self, code: int, *, host: str) -> None:
        super().__init__(code, "bad socket")
        self.host = host


@dataclasses.dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class Sly(Exception):
    """Comes back as something else."""

    def __reduce__(self) -> Any:
        return dict, ()


class TestErrors:
    @pytest.mark.parametrize(
        "exc",
        [
            ValueError("x"),
            KeyError(1),
            OSError(2, "no such", "file"),
            UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"),
            KeyboardInterrupt(),
            SystemExit(3),
            StopIteration(5),
            ExceptionGroup("group", [ValueError(1), TypeError(2)]),
            json.JSONDecodeError("bad", "doc", 1),
            np.exceptions.AxisError(3, 2),
            FrozenError(4),
            TaskError("was one already"),
        ],
    )
    def test_keep_type_and_content(self, exc):
        out = error_trip(exc)
        assert type(out) is type(exc)
        assert repr(out) == repr(exc)
        assert isinstance(out.__cause__, serial.RemoteTraceback)
        assert str(out.__cause__) == '\n"""\nthe text"""'

    def test_odd_constructors(self):
        out: Any = error_trip(OddInit(1, b=[2]))
        assert type(out) is OddInit
        assert (out.args, out.a, out.b) == (("1 and [2]",), 1, [2])
        out = error_trip(BadSocket(5, host="a"))
        assert type(out) is BadSocket
        assert out.host == "a"

    def test_an_attribute_that_does_not_pickle_is_left_out(self):
        out: Any = error_trip(LockInside(4))
        assert type(out) is LockInside
        assert out.code == 4
        assert not hasattr(out, "lock")

    @pytest.mark.parametrize(("exc", "text"), [(NoPickle(), "NoPickle: <unlocked"), (NoText(), "")])
    def test_what_does_not_pickle_is_a_task_error(self, exc, text):
        out = error_trip(exc)
        assert type(out) is TaskError
        assert str(out).startswith(text)
        assert "the text" in str(out.__cause__)

    def test_a_reducer_that_fails_or_lies_is_passed_by(self):
        assert type(error_trip(NoReduce(1))) is NoReduce
        assert type(error_trip(Sly(1))) is Sly

    def test_what_does_not_load_is_a_task_error(self, monkeypatch):
        payload = serial.encode_error(NoLoad("here"), "the text").tobytes()
        monkeypatch.setattr(NoLoad, "loads", False)
        out = serial.decode_error(memoryview(payload), ObjectRef)
        assert type(out) is TaskError
        assert str(out) == "NoLoad: here"
        assert "the text" in str(out.__cause__)

    def test_rubbish_is_a_task_error(self):
        for payload in (b"", bytes(8), b"\4" + bytes(20), b"\4" + b"\xff" * 100):
            assert type(serial.decode_error(memoryview(payload), ObjectRef)) is TaskError

    def test_the_text_tells_causes_and_contexts(self):
        def fail() -> None:
            try:
                {}["missing"]
            except KeyError as error:
                raise ValueError("outer") from error

        with pytest.raises(ValueError, match="outer") as caught:
            fail()
        text = str(error_trip(caught.value, None).__cause__)
        assert "KeyError: 'missing'" in text
        assert "direct cause" in text
        assert "in fail" in text

    def test_a_failure_passed_on_keeps_its_first_traceback(self):
        again = error_trip(error_trip(ValueError(1), "first place"), None)
        assert "first place" in str(again.__cause__)
        assert type(round_trip(again.__cause__)) is serial.RemoteTraceback

    def test_refs_and_arrays_inside(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        encoded = serial.encode_error(ValueError(ref, np.zeros(5000)), "")
        assert encoded.refs == [ref]
        assert len(encoded.buffers) == 1
        out = serial.decode_error(memoryview(encoded.tobytes()), ObjectRef)
        assert out.args[0] == ref
        assert out.args[1].shape == (5000,)

    def test_nesting_without_end_and_text_beyond_unicode(self):
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        assert type(error_trip(ValueError(deep))) in (TaskError, ValueError)
        out = error_trip(ValueError("\ud800"), "\ud800")
        assert type(out) is ValueError
        assert "\\ud800" in str(out.__cause__)

    def test_decode_raises_the_exception(self):
        payload = serial.encode_error(KeyError("k"), "").tobytes()
        with pytest.raises(KeyError, match="k"):
            serial.decode(memoryview(payload), make_ref=ObjectRef)
