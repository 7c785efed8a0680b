"""Calls: what of the arguments a task receives as values, and what as refs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.ref import ByRef, ObjectRef, by_ref
from hoplite_mp.errors import ObjectLostError
from tests.support.payloads import Boxed, FakeFuture, Point, a_ref, check_layout


class TestCalls:
    def call(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, list[ObjectRef[Any]]]:
        encoded = _serialize.encode_call(args, kwargs)
        payload = encoded.tobytes()
        check_layout(encoded, payload)
        assert set(encoded.dependencies) <= set(encoded.refs)
        got = _serialize.decode_call(memoryview(payload), ObjectRef, self.resolve)
        return (*got, encoded.dependencies)

    def resolve(self, ref: ObjectRef[Any]) -> Any:
        return f"value {int.from_bytes(ref._id, 'little')}"

    @pytest.mark.parametrize(
        ("args", "kwargs"),
        [((), {}), ((1, "a", None), {}), (([1], {2: 3}), {}), ((1,), {"k": [2]}), ((), {"k": 1})],
    )
    def test_plain_arguments(self, args, kwargs):
        assert self.call(*args, **kwargs) == (args, kwargs, [])

    def test_refs_are_replaced_by_values(self):
        one, two, three = a_ref(1), a_ref(2), FakeFuture(a_ref(3))
        args, kwargs, needs = self.call(one, 5, three, one)
        assert (args, kwargs) == (("value 1", 5, "value 3", "value 1"), {})
        assert needs == [a_ref(1), a_ref(3)]
        args, kwargs, needs = self.call([one, (two, {"k": {three}})], key={one: 1})
        assert args == (["value 1", ("value 2", {"k": {"value 3"}})],)
        assert kwargs == {"key": {"value 1": 1}}
        assert set(needs) == {a_ref(1), a_ref(2), a_ref(3)}

    def test_elsewhere_refs_stay_refs(self):
        boxed, point, frozen = Boxed(a_ref(1)), Point(a_ref(1), 2), frozenset({a_ref(1)})
        args, _, needs = self.call(boxed, point, frozen, OrderedDict(a=a_ref(1)))
        assert args == (boxed, point, frozen, {"a": a_ref(1)})
        assert needs == []
        assert _serialize.encode_call((boxed,), {}).refs == [a_ref(1)]

    def test_by_ref_hands_refs_over(self):
        shared = [a_ref(1)]
        args, _, needs = self.call(by_ref(shared), shared, by_ref(a_ref(2)), a_ref(2))
        assert args == ([a_ref(1)], ["value 1"], a_ref(2), "value 2")
        assert needs == [a_ref(1), a_ref(2)]
        args, _, needs = self.call(by_ref(5), [ByRef(FakeFuture(a_ref(4)))])
        assert args == (5, [a_ref(4)])
        assert needs == []

    def test_the_same_ref_is_resolved_once(self):
        seen: list[Any] = []
        for args in ((a_ref(1), a_ref(1)), ([a_ref(1)], {"k": a_ref(1)})):
            payload = _serialize.encode_call(args, {}).tobytes()
            _serialize.decode_call(memoryview(payload), ObjectRef, seen.append)
        assert seen == [a_ref(1)] * 2

    def test_arrays_by_value_are_the_tasks_own(self):
        small, large, view = np.zeros(3), np.zeros(5000), np.zeros((3, 4))[:, ::2]
        args, _, _ = self.call(small, [large], Boxed(view), np.array([None]), memoryview(b"abc"))
        assert args[0].flags.writeable
        assert args[1][0].flags.writeable
        assert args[2].array.flags.writeable
        assert args[3].flags.writeable
        assert not args[4].readonly

    def test_resolved_values_are_left_as_they_are(self):
        array = np.zeros(3)
        array.flags.writeable = False
        for args in ((a_ref(),), ([a_ref()], np.zeros(1000))):
            payload = _serialize.encode_call(args, {}).tobytes()
            out, _ = _serialize.decode_call(memoryview(payload), ObjectRef, lambda ref: array)
            assert (out[0] if out[0] is array else out[0][0]) is array

    def test_cycles_and_sharing_survive_the_walk(self):
        shared = [1]
        cycle: list[Any] = [a_ref(1), shared, shared]
        cycle.append((cycle,))
        (out,), _, _ = self.call(cycle)
        assert out[0] == "value 1"
        assert out[1] is out[2]
        assert out[3][0] is out
        assert cycle[0] == a_ref(1)

    def test_a_failing_resolve_is_the_readers_to_handle(self):
        payload = _serialize.encode_call(([a_ref()],), {}).tobytes()

        def resolve(ref: ObjectRef[Any]) -> Any:
            raise KeyError(ref.id)

        with pytest.raises(KeyError):
            _serialize.decode_call(memoryview(payload), ObjectRef, resolve)


def test_arguments_that_were_lost() -> None:
    """Their host has gone while they were on their way: the error stands where they would."""
    payload = _serialize.encode_error(ObjectLostError("they are gone"), "").tobytes()
    with pytest.raises(ObjectLostError, match="they are gone"):
        _serialize.decode_call(memoryview(payload), ObjectRef, lambda ref: None)
