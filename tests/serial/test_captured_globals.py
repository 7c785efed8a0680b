"""Fingerprints, and the rules by which globals of functions by value are written."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import threading
import types
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize import captured_globals
from hoplite_mp._serialize.captured_globals import TooLarge, fingerprint
from tests.support.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator


def make(**values: Any) -> dict[str, Any]:
    """Globals of no module."""
    scope = {"__name__": "somewhere", **values}
    exec("def look(): return x\ndef both(): return look(), x\ndef other(): return y", scope)
    return scope


@contextlib.contextmanager
def quick_switches() -> Iterator[None]:
    """Threads take turns after a microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads as another process would, with namespaces of its own."""
    monkeypatch.setattr(captured_globals, "_received", {})
    monkeypatch.setattr(captured_globals, "_by_place", {})

    def read(data: bytes) -> tuple[Any, _serialize.BroughtGlobals]:
        with monkeypatch.context() as patch:
            patch.setattr(captured_globals._state, "process", b"elsewher")
            function, carried = _serialize.decode_with_carried(data)
            carried.check()
            return function, carried

    return read


class TestFingerprints:
    @pytest.mark.parametrize(
        "value",
        [1, 1.5, "text", b"x" * 1000, None, (1, 2), {"a": [1]}, {1, 2}, np.arange(5000), len, np,
         functools.partial(len), lambda: 0, ValueError("x")],
        ids=lambda value: repr(value).partition(" at 0x")[0],
    )  # fmt: skip
    def test_the_same_as_long_as_nothing_changes(self, value: Any) -> None:
        assert fingerprint(value) == fingerprint(value)
        assert fingerprint(value) != fingerprint([value])
        assert fingerprint(value)[0] != captured_globals.ABSENT

    def test_types_and_values_differ(self) -> None:
        values: list[Any] = [1, True, 1.0, "1", b"1", 0.0, -0.0, [1], (1,), {1}, {1: 1}]
        assert len({fingerprint(value)[0] for value in values}) == len(values)

    def test_changes_of_what_can_change(self) -> None:
        class Local:
            attribute = 1

        def f(x: int = 1) -> int:
            return x + free

        array, instance, free = np.zeros(5000), Local(), 1
        values = [array, instance, f, Local, [f, array]]

        def all_of_them() -> list[bytes]:
            return [fingerprint(value)[0] for value in values]

        before = all_of_them()
        array[3] = 1
        instance.attribute = 2
        free = 2
        Local.attribute = 3
        after = all_of_them()
        assert all(a != b for a, b in zip(before, after, strict=True))
        f.__defaults__ = (5,)
        assert fingerprint(f)[0] != after[2]
        assert fingerprint(lambda: 0) != fingerprint(lambda: 0)

    def test_refs_are_found_wherever_they_are(self) -> None:
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        assert fingerprint(ref)[1]
        assert fingerprint({"a": [ref]})[1]
        assert fingerprint(lambda: ref)[1]
        assert not fingerprint(lambda: 0)[1]

    def test_large_ones_can_be_refused(self) -> None:
        assert fingerprint([np.zeros(1000)], 1 << 20)
        with pytest.raises(TooLarge):
            fingerprint([np.zeros(1 << 18)], 1 << 20)


class TestWriting:
    def test_only_what_the_sender_has_changed_is_written(self, elsewhere: Any) -> None:
        scope = make(x=0, y=[0])
        look, _ = elsewhere(_serialize.encode_function(scope["look"]))
        other, _ = elsewhere(_serialize.encode_function(scope["other"]))
        assert look.__globals__ is other.__globals__ is not scope
        look.__globals__["x"] = 10
        other().append(1)
        again, _ = elsewhere(_serialize.encode_function(scope["both"]))
        assert again() == (10, 10)
        scope["x"] = 5
        again, _ = elsewhere(_serialize.encode_function(scope["look"]))
        assert again() == look() == 5
        assert other() == [0, 1]
        scope["y"].append(2)
        elsewhere(_serialize.encode_function(scope["other"]))
        assert other() == [0, 2]

    def test_versions_by_turns(self, elsewhere: Any) -> None:
        scope = make(x=0)
        versions = []
        for x in range(3):
            scope["x"] = x
            versions.append(elsewhere(_serialize.encode_function(scope["both"])))
        del scope["x"]
        versions.append(elsewhere(_serialize.encode_function(scope["both"])))
        for x in (0, 2, 1, 1, 0, 2):
            function, carried = versions[x]
            carried.check()
            assert function() == (x, x)
        function, carried = versions[3]
        carried.check()
        with pytest.raises(NameError):
            function()

    def test_a_run_takes_refs_back(self, elsewhere: Any) -> None:
        scope = make(x=ObjectRef(bytes(16)), y=1)
        data = _serialize.encode_function(scope["look"])
        for _ in range(2):
            before = _serialize.begin_run()
            look, _ = elsewhere(data)
            assert look() == scope["x"]
            _serialize.end_run(before)
            assert "x" not in look.__globals__
        before = _serialize.begin_run()
        look, _ = elsewhere(data)
        look.__globals__["x"] = "the run's own"
        _serialize.end_run(before)
        assert look() == "the run's own"

    def test_a_run_inside_a_run_leaves_nothing(self, elsewhere: Any) -> None:
        scope = make(x=0)
        outer = _serialize.begin_run()
        look, _ = elsewhere(_serialize.encode_function(scope["look"]))
        scope["x"] = 1
        inner = _serialize.begin_run()
        assert elsewhere(_serialize.encode_function(scope["look"]))[0]() == 1
        _serialize.end_run(inner)
        assert look() == 0
        _serialize.end_run(outer)
        assert look() == 0

    def test_what_is_gone_for_long_is_forgotten(
        self, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(captured_globals, "NAMESPACES_MAX", 3)
        looks = [elsewhere(_serialize.encode_function(make(x=x)["look"]))[0] for x in range(10)]
        assert [look() for look in looks] == list(range(10))
        assert len(captured_globals._received) == len(captured_globals._by_place) == 3
        monkeypatch.setattr(captured_globals, "SENDERS_MAX", 3)
        variable = captured_globals.Variable()
        for sender in range(10):
            variable.note(b"%d" % sender, b"1")
        assert list(variable.marks) == [b"7", b"8", b"9"]

    def test_at_home_nothing_is_written(self) -> None:
        function = _serialize.decode_function(_serialize.encode_function(lambda: ROOT))
        assert function.__globals__ is globals()

    def test_copies_of_globals_are_globals_of_their_own(self, elsewhere: Any) -> None:
        scope = make(x=1)
        data = _serialize.encode_function(scope["look"])
        copy = dict(scope)
        exec("def look(): return x", copy)
        first, second = elsewhere(data)[0], elsewhere(_serialize.encode_function(copy["look"]))[0]
        assert first.__globals__ is not second.__globals__
        assert first.__globals__ is elsewhere(data)[0].__globals__

    def test_a_forked_process_is_another_sender(self) -> None:
        code = (
            "import os\nfrom hoplite_mp._serialize.captured_globals import process\n"
            "mine = process()\n"
            "if os.fork() == 0: os._exit(process() == mine)\n"
            "print(os.waitstatus_to_exitcode(os.wait()[1]), process() == mine)\n"
        )
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        )
        assert done.stdout.split() == ["0", "True"]


def test_threads_that_are_first_to_send_find_one_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or an initializer and the function that needs it would get namespaces of their own."""
    with quick_switches():
        for turn in range(100):
            module = types.ModuleType(f"met_by_many_{turn}")
            monkeypatch.setitem(sys.modules, module.__name__, module)
            barrier = threading.Barrier(4)

            def find(barrier: threading.Barrier, scope: dict[str, Any]) -> Any:
                barrier.wait()
                return captured_globals.namespace_of(scope).key

            with ThreadPoolExecutor(4) as pool:
                found = [pool.submit(find, barrier, module.__dict__) for _ in range(4)]
                assert len({one.result() for one in found}) == 1


def test_process_name_asked_for_by_many_threads_at_first_is_one() -> None:
    """Or an initializer and the function that needs it would have two senders. Also in a child."""
    code = """
import os, threading, time
chosen, slowly = os.urandom, lambda n: (time.sleep(0.05), chosen(n))[1]
os.urandom = slowly
from hoplite_mp._serialize.captured_globals import process

def names():
    found, barrier = [], threading.Barrier(4)
    def ask():
        barrier.wait()
        found.append(process())
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for one in threads: one.start()
    for one in threads: one.join()
    return set(found)

mine = names()
if os.fork() == 0:
    other = names()
    os._exit(not (len(other) == 1 and other != mine))
print(os.waitstatus_to_exitcode(os.wait()[1]), len(mine), names() == mine)
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "1", "True"]


def test_unpicklable_global_of_a_decorator_is_that_of_its_module(elsewhere: Any) -> None:
    scope: dict[str, Any] = {"__name__": "a script", "np": np}
    exec("@np.errstate(divide='ignore')\ndef look(): return np.geterr()['divide']", scope)
    assert scope["look"].__globals__ is not scope  # NumPy's, with an unpicklable ContextVar
    look, _ = elsewhere(_serialize.encode_function(scope["look"]))
    assert look() == "ignore"
    assert np.geterr()["divide"] != "ignore"


def test_function_fingerprinted_by_many_threads_at_first_has_one_fingerprint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    barrier, met = threading.Barrier(4), threading.local()

    class Slow(weakref.WeakKeyDictionary[Any, Any]):
        """All threads have looked before the first of them writes."""

        def setdefault(self, key: Any, default: Any = None) -> Any:
            if not hasattr(met, "once"):
                met.once = barrier.wait()
            return super().setdefault(key, default)

    monkeypatch.setattr(captured_globals, "_numbered", Slow())
    with ThreadPoolExecutor(4) as pool:
        function = lambda: 0  # noqa: E731
        found = [pool.submit(fingerprint, function) for _ in range(4)]
        assert len({one.result() for one in found}) == 1


def test_entry_written_by_two_threads_keeps_the_value_of_a_task() -> None:
    """The second thread has found the entry missing before the first wrote it."""
    scope: dict[str, Any] = {}
    entry = ("x", b"sender", b"1", False, 1)

    class Slow(dict[bytes, bytes]):
        """The marks of a variable; a task sets the variable between the look and the write."""

        def get(self, key: bytes, default: Any = None) -> Any:
            found = super().get(key, default)
            if not scope:
                variable.marks = dict(self)
                variable.receive(entry)
                scope["x"] = "set by the task"
            return found

    variable = captured_globals.Variable(scope, "x")
    variable.marks = Slow()
    variable.receive(entry)
    assert scope == {"x": "set by the task"}


def test_carried_checked_while_another_thread_writes_is_checked_again(elsewhere: Any) -> None:
    scope = make(x=1, y=1)
    look, carried = elsewhere(_serialize.encode_function(scope["look"]))
    scope["x"] = 2
    late = _serialize.encode_function(scope["look"])
    original = captured_globals.look_at_fresh

    def meanwhile() -> None:
        original()
        elsewhere(late)

    carried.check()
    elsewhere(_serialize.encode_function(scope["other"]))
    captured_globals._state.fresh.append((captured_globals.Variable(), 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(captured_globals, "look_at_fresh", meanwhile)
        carried.check()
    assert look() == 2
    carried.check()
    assert look() == 1
