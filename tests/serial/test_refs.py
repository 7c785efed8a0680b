"""Refs in a value: they stay refs, and are the same ones when it is read."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ObjectRef, by_ref, runtime_hooks
from tests.support.payloads import Boxed, FakeFuture, a_ref, load, round_trip


class TestRefs:
    def test_stay_refs_in_a_value(self):
        value = {"a": [a_ref(1), (a_ref(2), a_ref(1))], "b": Boxed(a_ref(3))}
        encoded = _serialize.encode(value)
        assert encoded.refs == [a_ref(1), a_ref(2), a_ref(3)]
        made: list[bytes] = []

        def make_ref(id: bytes) -> ObjectRef[Any]:
            made.append(id)
            return ObjectRef(id)

        out = _serialize.decode(memoryview(encoded.tobytes()), make_ref=make_ref)
        assert out == value
        assert sorted(made) == sorted(ref._id for ref in encoded.refs)
        assert out["a"][0] is out["a"][1][1]

    def test_a_future_stands_for_its_ref(self):
        assert round_trip([FakeFuture(a_ref())]) == [a_ref()]
        assert round_trip(FakeFuture(a_ref())) == a_ref()

    def test_by_ref_in_a_value_is_its_content(self):
        assert round_trip(by_ref([a_ref()])) == [a_ref()]

    def test_readings_nest(self):
        outer = _serialize.encode(Nested(_serialize.encode([a_ref(9)]).tobytes(), a_ref(1)))
        out = load(outer)
        assert out.inner == [a_ref(9)]
        assert out.after == a_ref(1)

    def test_immutable_hashable_and_equal_by_id(self):
        ref = ObjectRef(bytes(range(16)))
        assert ref == ObjectRef(bytes(range(16)), object())
        assert ref != a_ref()
        assert ref != ref.id
        assert len({ref, ObjectRef(bytes(range(16)))}) == 1
        assert ref.id == bytes(range(16)).hex()
        assert repr(ref) == f"ObjectRef({ref.id})"
        assert copy.deepcopy([ref])[0] is copy.copy(ref) is ref
        for name in ("_id", "other"):
            with pytest.raises(AttributeError, match="immutable"):
                setattr(ref, name, b"")
        with pytest.raises(AttributeError, match="immutable"):
            del ref._id
        with pytest.raises(ValueError, match="16 bytes"):
            ObjectRef(b"short")
        assert ObjectRef[int](bytes(16)) == ObjectRef(bytes(16))
        assert repr(by_ref(1)) == "by_ref(1)"

    def test_foreign_pickles_attach_anew(self, monkeypatch):
        ref = a_ref()
        out = pickle.loads(pickle.dumps(ref))
        assert out == ref
        assert out._hold is None
        monkeypatch.setattr(runtime_hooks, "attach", lambda id: ("held", id))
        assert pickle.loads(pickle.dumps(ref))._hold == ("held", ref._id)

    def test_contributors_ask_the_runtime(self, monkeypatch):
        assert a_ref().contributors is None
        monkeypatch.setattr(runtime_hooks, "contributors", lambda ref: (0, int(ref.id[:2], 16)))
        assert a_ref(3).contributors == (0, 3)


class Nested:
    """Reads another payload while it is being read."""

    def __init__(self, payload: bytes, after: Any) -> None:
        self.payload = payload
        self.after = after

    def __reduce__(self) -> Any:
        return _read_nested, (self.payload,), {"after": self.after}


def _read_nested(payload: bytes) -> Nested:
    nested = Nested(payload, None)
    nested.inner = _serialize.decode(memoryview(payload), make_ref=ObjectRef)
    return nested
