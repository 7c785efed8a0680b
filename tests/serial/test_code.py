"""Functions and classes: by reference where readers can import them, else by value."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import operator
import sys
import threading
import types
import typing
from typing import Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize import code
from tests.support.payloads import function_trip, round_trip
from tests.support.processes import run_python


def importable_function(x: int) -> int:
    return x + 1


class ImportableClass:
    class Inner:
        def method(self) -> int:
            return 7


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
        assert code.importable(importable_function)
        assert code.importable(ImportableClass.Inner)
        assert not code.importable(lambda: 0)
        assert not code.importable(functools.partial(len))
        replaced = types.FunctionType(
            importable_function.__code__, globals(), "importable_function"
        )
        assert not code.importable(replaced)

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
        encoded = _serialize.encode([lambda: ref, array])
        assert encoded.refs == [ref]
        assert [b.nbytes for b in encoded.buffers] == [80_000]
        function, out = _serialize.decode(memoryview(encoded.tobytes()), make_ref=ObjectRef)
        assert function() == ref
        assert not out.flags.writeable

    def test_refs_in_the_closure_of_a_call(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        encoded = _serialize.encode_call(([ref], lambda: ref), {})
        assert encoded.dependencies == [ref]
        (values, function), _ = _serialize.decode_call(
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
        monkeypatch.setattr(code, "_path", None)  # perhaps that of workers of an earlier test
        import byvalue  # type: ignore[import-not-found]

        assert round_trip([byvalue.g])[0] is byvalue.g
        _serialize.register_pickle_by_value(byvalue)
        try:
            payload = _serialize.encode([byvalue.g, byvalue.Thing()]).tobytes()
            data = _serialize.encode_function(byvalue.g)
        finally:
            del code.by_value_modules["byvalue"]
            sys.modules["cloudpickle"].unregister_pickle_by_value(byvalue)
        (tmp_path / "payload").write_bytes(payload)
        (tmp_path / "function").write_bytes(data)
        run_python(
            """
            import sys
            from hoplite_mp import _serialize as serial
            from hoplite_mp._common.ref import ObjectRef
            mem = memoryview(open(sys.argv[1] + "/payload", "rb").read())
            function, thing = serial.decode(mem, make_ref=ObjectRef)
            assert function(1) == 3 and thing.f() == 3 and "byvalue" not in sys.modules
            assert serial.decode_function(open(sys.argv[1] + "/function", "rb").read())(4) == 6
            """,
            tmp_path,
        )

    def test_registering_needs_an_imported_module(self):
        with pytest.raises(TypeError, match="expected a module"):
            _serialize.register_pickle_by_value("numpy")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"sys\.modules"):
            _serialize.register_pickle_by_value(types.ModuleType("never_imported"))

    def test_what_only_cloudpickle_can_do(self):
        assert list(round_trip([{"a": 1}.keys()])[0]) == ["a"]
        assert round_trip(types.MappingProxyType({"a": 1}))["a"] == 1

    def test_display_names(self):
        class Local:
            def method(self) -> None: ...

            def __call__(self) -> None: ...

        def name(function: Any) -> str:
            return _serialize.function_name(memoryview(_serialize.encode_function(function)))

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
            _serialize.encode_function(lambda: lock)
