"""Reductions of what one host has: in one pass, and a chunk at a time, to the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._common.reduction import fold
from hoplite_mp._node.collectives import chunked_reduce
from hoplite_mp._node.collectives.chunked_reduce import ChunkedReduce
from hoplite_mp._node.execution.local_reduce import PlanError, prepare, slices_of
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.local import Collective
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (7, 300)
SOURCES = 5
CHUNK = 2  # sources that are folded at a time


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


class Reduction:
    """Of some arrays of a host, into so many slices."""

    def __init__(self, host: ShmHost, op: str, arrays: list[Any], slices: int = 1) -> None:
        self.host, self.slices = host, slices
        put = [self._put(array) for array in arrays]
        self.holds = [hold for _, hold in put]
        self.ask = Collective(
            [0] * slices,
            [oid for oid, _ in put],
            "reduce" if slices == 1 else "reduce_scatter",
            op,
            len(arrays),
            None,
            True,
        )
        order = tuple(range(len(arrays)))
        self.plan = m.ExecuteReduce(
            1, 1, order, order, (m.Stripe(0, 0, m.SHARES),), "fold", "reduce", op, 0,
            (bytes(16),) * len(arrays), (0,) * len(arrays), (0,),
        )  # fmt: skip

    def _put(self, array: Any) -> tuple[int, Any]:
        encoded = _serialize.encode(array)
        payload = self.host.store.lease(encoded.nbytes, NODE_SLOT)
        assert payload is not None
        self.host.node.write(payload, encoded.head, encoded.buffers, encoded.offsets)
        oid = self.host.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
        hold = self.host.node.hold(oid, False)
        self.host.results.store_block(oid, payload, encoded.nbytes)
        return oid, hold

    def at_once(self) -> list[Any]:
        execution = prepare(self.host.results, self.ask, self.plan)
        assert execution is not None
        execution.run(1)
        return self._values(execution)

    def in_chunks(self) -> list[Any]:
        execution = ChunkedReduce(self.host.results, self.ask, self.plan)
        while not execution.done:
            assert execution.pin()
            assert len(execution.views) <= CHUNK
            execution.run(1)
            execution.let_go()
        return self._values(execution)

    def _values(self, execution: Any) -> list[Any]:
        found = []
        for payload, nbytes in execution.take():
            memory = memoryview(bytes(self.host.node.memory(payload, nbytes)))
            value: Any = _serialize.decode(memory, make_ref=lambda i: None)  # type: ignore[arg-type,return-value]
            found.append(np.asarray(value))
            self.host.store.free(payload)
        return found


def arrays_of(dtype: Any, orders: str = "C") -> list[Any]:
    """Some, in these memory orders by turns."""
    random = np.random.default_rng(3)
    made = [random.normal(20, 6, SHAPE).astype(dtype) for _ in range(SOURCES)]
    return [np.asarray(one, order=orders[i % len(orders)]) for i, one in enumerate(made)]  # type: ignore[call-overload]


def same(found: list[Any], wanted: Any) -> bool:
    parts = np.array_split(wanted, len(found))
    assert [one.shape for one in found] == [one.shape for one in parts]
    assert {one.dtype for one in found} == {wanted.dtype}
    return all(one.tobytes() == part.tobytes() for one, part in zip(found, parts, strict=True))


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("orders", ["C", "F", "CF"])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        ("sum", np.float32),
        ("max", np.int16),
        ("mean", np.int32),
        ("mean", np.complex64),
        ("sum", np.float16),
        ("mean", ml_dtypes.bfloat16),
        ("hypot", np.float64),
    ],
)
def test_local_reduction_has_the_bits_of_a_left_fold(
    host: ShmHost, monkeypatch: pytest.MonkeyPatch, op: str, dtype: Any, orders: str, slices: int
) -> None:
    arrays = arrays_of(dtype, orders)
    share = host.store.limit // (CHUNK * arrays[0].nbytes)
    monkeypatch.setattr(chunked_reduce, "CHUNK_SHARE", share)
    monkeypatch.setattr(chunked_reduce, "WIDENED_ITEMS", 101)  # several for each slice
    reduction = Reduction(host, op, arrays, slices)
    wanted = np.ascontiguousarray(fold(op, arrays))
    assert same(reduction.at_once(), wanted)
    assert same(reduction.in_chunks(), wanted)
    host.store.take_returns()
    assert len(host.store.leases) == SOURCES


def test_fold_that_overflows_does_not_warn() -> None:
    """Kernels do not warn either. Warnings are errors in this test run."""
    assert np.isinf(fold("sum", [np.full(1, 60_000, np.float16)] * 2))


@pytest.mark.parametrize("text", ["a", "abc"])
def test_source_that_is_not_an_array_is_named(host: ShmHost, text: str) -> None:
    reduction = Reduction(host, "sum", [np.ones(3), text])
    with pytest.raises(PlanError, match=r"source 1 .* is neither an array nor a number"):
        reduction.at_once()


def test_bfloat16_rounding_keeps_nan_and_ties_to_even() -> None:
    """Half of a unit goes to the even one, and a NaN never becomes an infinity."""
    bits = np.array(
        [0x3F80_8000, 0x3F81_8000, 0x3F80_8001, 0x7F80_0000, 0x7F80_0001, 0xFFFF_FFFF], np.uint32
    )
    narrow = chunked_reduce._bfloat16(bits.view(np.float32))
    assert [*narrow] == [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFFF]


def test_slices_are_those_of_array_split() -> None:
    for shape in ((7, 300), (300, 7), (2,), (0, 3), (9, 0)):
        for count in (1, 2, 3, 9):
            split = np.array_split(np.empty(shape), count)
            assert slices_of(shape, count) == [part.shape for part in split]
    with pytest.raises(PlanError, match="at least one dimension"):
        slices_of((), 2)
