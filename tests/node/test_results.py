"""Values and errors that the node writes, and the layouts of those that are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp._node.objects.remote_objects import layout_of, parse_layout
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


def new(host: ShmHost) -> tuple[int, Any]:
    """A result that is to come, and a hold on it."""
    oid = host.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
    return oid, host.node.hold(oid, False)


def value(host: ShmHost, oid: int) -> Any:
    got: Any = host.node.view(oid)
    mem = memoryview(got)
    if _serialize.payload_kind(mem) == _serialize.ERROR:
        return _serialize.decode_error(mem, lambda i: None)  # type: ignore[arg-type,return-value]
    return _serialize.decode(mem, make_ref=lambda i: None)  # type: ignore[arg-type,return-value]


def test_result_without_space_is_replaced_by_a_small_error(host: ShmHost) -> None:
    """A value by another value, and an error by a short one."""
    host.store.limit = 0
    (one, _hold), (other, _other_hold) = new(host), new(host)
    large = _serialize.encode("v" * 5000)
    host.results.store_value(one, large, False, instead=lambda: _serialize.encode("instead"))
    assert host.node.state(one) == STATE["SEALED"]
    assert value(host, one) == "instead"
    error = ValueError("e" * 5000)
    host.results.store_error(other, error)
    assert host.node.state(other) == STATE["FAILED"]
    assert isinstance(value(host, other), ValueError)


def test_layout_of_a_spilled_array_is_known(host: ShmHost) -> None:
    host.store.limit = MIB + MIB // 2
    layouts, holds = [], []
    for number in (3, 4):
        array = np.zeros((MIB // 4 // number, number), np.float32)
        encoded = _serialize.encode(array)
        if number == 3:  # its head is longer than others'
            head, offset, nbytes = _serialize.encode_array_head(
                array.dtype, array.shape, "C", tuple(range(50_000))
            )
            encoded = _serialize.Encoded(head, encoded.buffers, [offset], nbytes, [])
        oid, hold = new(host)
        holds.append(hold)
        payload = host.store.lease(encoded.nbytes, NODE_SLOT)
        assert payload is not None
        host.node.write(payload, encoded.head, encoded.buffers, encoded.offsets)
        host.results.store_block(oid, payload, encoded.nbytes)
        layouts.append((oid, (array.shape, "<f4")))
    assert {host.node.state(oid) for oid, _ in layouts} == {STATE["SPILLED"], STATE["SEALED"]}
    nowhere: Any = type("Nowhere", (), {"by_oid": {}})
    for oid, layout in layouts:
        assert parse_layout(layout_of(host.results, nowhere, oid)) == layout
    text, _hold = new(host)
    host.results.store_value(text, _serialize.encode("no array"), False)
    assert layout_of(host.results, nowhere, text) == b""
    waits, _hold = new(host)
    assert layout_of(host.results, nowhere, waits) == b""
