"""Bytes near legal ones: what strangers, spoiled wires and broken peers send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import strategies as st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["near"]

NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)
CHANGES_MAX = 4
SCALARS = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers(-(1 << 63), (1 << 64) - 1),
    st.none(),
    st.booleans(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=40),
    st.sampled_from([bytes(16), "", b"", "sum"]),
    st.sampled_from([70_000, 90_000]).map(lambda count: b"y" * count),
    st.sampled_from([300, 70_000]).map(lambda count: "x" * count),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.integers(0, 9), st.text(max_size=3)), inner, max_size=3),
    ),
    max_leaves=8,
)


def near(samples: tuple[bytes, ...], packed: bool) -> SearchStrategy[bytes]:
    """Noise, samples with some bytes changed, and if they are MessagePack with fields changed."""
    ways = [st.binary(max_size=300), _spoiled(samples)]
    if packed:
        ways += [_refilled(samples), ANYTHING.map(msgspec.msgpack.encode)]
    return st.one_of(ways)


@st.composite
def _spoiled(draw: DrawFn, samples: tuple[bytes, ...]) -> bytes:
    data = bytearray(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, CHANGES_MAX))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "set", "cut", "remove", "insert", "number", "splice"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "set" if at < len(data):
                data[at] = draw(st.integers(0, 255))
            case "cut":
                del data[at:]
            case "remove":
                del data[at : at + draw(st.integers(1, 16))]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
            case "number":
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(st.sampled_from(NUMBERS)) & ((1 << 8 * size) - 1)
                order = draw(st.sampled_from(["little", "big"]))
                data[at : at + size] = number.to_bytes(size, order)
            case "splice":
                data[at:] = draw(st.sampled_from(samples))[at:]
    return bytes(data)


@st.composite
def _refilled(draw: DrawFn, samples: tuple[bytes, ...]) -> bytes:
    """The same fields but for some, and for how many there are."""
    value = msgspec.msgpack.decode(draw(st.sampled_from(samples)))
    for _ in range(draw(st.integers(1, CHANGES_MAX))):
        value = _changed(draw, value)
    return msgspec.msgpack.encode(value)


def _changed(draw: DrawFn, value: Any) -> Any:
    if not isinstance(value, list | dict) or not value or draw(st.integers(0, 9)) == 0:
        return draw(ANYTHING)
    key = draw(
        st.sampled_from(range(len(value)) if isinstance(value, list) else sorted(value, key=repr))
    )
    how = draw(st.integers(0, 9))
    if how == 0:
        del value[key]
    elif how == 1 and isinstance(value, list):
        value.insert(key, draw(ANYTHING))
    elif how == 2 and isinstance(value, list):
        value[key : key + 1] = [value[key]] * draw(st.sampled_from([2, 3, 70]))
    else:
        value[key] = _changed(draw, value[key])
    return value
