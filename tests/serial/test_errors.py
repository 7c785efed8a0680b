"""Failures: what travels, and what a reader makes of it."""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._protocol.fields import PAYLOAD_BYTES_MAX
from hoplite_mp._serialize import ERROR
from hoplite_mp._serialize.errors import WHOLE_BYTES_MAX
from hoplite_mp._serialize.layout import HAS_SHORT_FORM
from hoplite_mp.errors import TaskError
from tests.support.payloads import round_trip


def error_trip(exc: BaseException, text: str | None = "the text") -> BaseException:
    encoded = _serialize.encode_error(exc, text)
    assert encoded.kind == ERROR
    return _serialize.decode_error(memoryview(encoded.tobytes()), ObjectRef)


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

    def __reduce__(self) -> Any:
        return _load, self.args


def _load(*args: Any) -> NoLoad:
    if not NoLoad.loads:
        raise RuntimeError("this process cannot")
    return NoLoad(*args)


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
        assert isinstance(out.__cause__, _serialize.RemoteTraceback)
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
        payload = _serialize.encode_error(NoLoad("here"), "the text").tobytes()
        monkeypatch.setattr(NoLoad, "loads", False)
        out = _serialize.decode_error(memoryview(payload), ObjectRef)
        assert type(out) is TaskError
        assert str(out) == "NoLoad: here"
        assert "the text" in str(out.__cause__)

    def test_rubbish_is_a_task_error(self):
        for payload in (b"", bytes(8), b"\4" + bytes(20), b"\4" + b"\xff" * 100):
            assert type(_serialize.decode_error(memoryview(payload), ObjectRef)) is TaskError

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
        assert type(round_trip(again.__cause__)) is _serialize.RemoteTraceback

    def test_refs_and_arrays_inside(self):
        ref: ObjectRef[int] = ObjectRef(bytes(16))
        encoded = _serialize.encode_error(ValueError(ref, np.zeros(5000)), "")
        assert encoded.refs == [ref]
        assert len(encoded.buffers) == 1
        out = _serialize.decode_error(memoryview(encoded.tobytes()), ObjectRef)
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
        payload = _serialize.encode_error(KeyError("k"), "").tobytes()
        with pytest.raises(KeyError, match="k"):
            _serialize.decode(memoryview(payload), make_ref=ObjectRef)


def sent(encoded: _serialize.Encoded) -> BaseException:
    """What arrives on another host."""
    assert PAYLOAD_BYTES_MAX >= WHOLE_BYTES_MAX
    payload = _serialize.short_error(memoryview(encoded.tobytes()))
    assert len(payload) <= WHOLE_BYTES_MAX
    return _serialize.decode_error(memoryview(payload), ObjectRef)


@pytest.mark.parametrize(
    "exc",
    [
        ValueError("begins" + "x" * 40_000),
        ValueError("begins" + "\u20ac" * 400_000),
        ValueError("begins", np.zeros(200_000)),
        ValueError("begins", "y" * 1000, ["z" * 100_000]),
        OddInit("begins" + "x" * 100_000, b=1),
        OddInit("begins", b=np.zeros(200_000)),
    ],
)
def test_a_long_one_keeps_its_type_on_another_host(exc: BaseException) -> None:
    text = "raised here\n" + "line\n" * 50_000
    for encoded in (
        _serialize.encode_error(exc, text),
        _serialize.encode_short_error(exc, text, 1 << 20),
        _serialize.encode_short_error(exc, text, WHOLE_BYTES_MAX),
    ):
        found = sent(encoded)
        assert type(found) is type(exc)
        assert found.args[0].startswith("begins")
        assert "raised here" in str(found.__cause__)
    here = _serialize.decode_error(
        memoryview(_serialize.encode_error(exc, text).tobytes()), ObjectRef
    )
    assert here.args[0] == exc.args[0]
    assert str(here.__cause__).count("line") == 50_000


def test_what_fits_travels_as_it_is() -> None:
    encoded = _serialize.encode_error(ValueError("x" * 20_000), "the text")
    assert _serialize.short_error(memoryview(encoded.tobytes())) == encoded.tobytes()


@pytest.mark.parametrize("flags", [0, HAS_SHORT_FORM])
def test_a_long_one_without_a_short_form_keeps_its_words(flags: int) -> None:
    """A payload that another version has written, or that is damaged."""
    payload = bytearray(_serialize.encode_error(ValueError("y" * 100_000), "the text").tobytes())
    payload[1] = flags
    payload[-8:] = b"\xff" * 8
    found = _serialize.decode_error(
        memoryview(_serialize.short_error(memoryview(payload))), ObjectRef
    )
    assert type(found) is TaskError
    assert str(found).startswith("ValueError: yyy")
    assert "the text" in str(found.__cause__)


def test_a_short_form_of_a_class_with_an_odd_name() -> None:
    kind = type("Odd", (ValueError,), {"__module__": __name__})
    kind.__qualname__ = "caf\udce9"
    encoded = _serialize.encode_short_error(kind("x" * 100_000), "the text", 1000)
    assert encoded.nbytes <= 1000
    assert "xxx" in str(_serialize.decode_error(memoryview(encoded.tobytes()), ObjectRef))
