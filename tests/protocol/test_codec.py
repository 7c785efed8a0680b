"""Frames: whole again however they were cut; what is malformed is the peer's doing."""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hoplite_mp._protocol import codec
from hoplite_mp._protocol import messages as m
from hoplite_mp._protocol.membership import Report
from hoplite_mp.errors import ProtocolError
from tests.support.messages import ID, SAMPLES

Anything = m.AnyMessage | Report

WIRE = b"".join(map(codec.encode, SAMPLES))


def head(length: int, body: bytes = b"") -> bytes:
    sums = struct.pack("<II", length, zlib.crc32(body))
    return sums + struct.pack("<I", zlib.crc32(sums))


def frame(body: bytes) -> bytes:
    return head(len(body), body) + body


def packed(value: Any) -> bytes:
    return frame(msgspec.msgpack.encode(value))


def decoder(frame_bytes_max: int = codec.FRAME_BYTES_MAX) -> codec.Decoder[Anything]:
    return codec.Decoder(Anything, frame_bytes_max)


@settings(max_examples=40)
@given(st.lists(st.integers(0, len(WIRE)), max_size=12))
def test_frames_cut_anywhere_decode_equally(cuts: list[int]) -> None:
    places = sorted([0, *cuts, len(WIRE)])
    d = decoder()
    got = [x for a, b in pairwise(places) for x in d.feed(WIRE[a:b])]
    assert got == list(SAMPLES)
    assert d.buffered == 0


def test_frames_fed_byte_by_byte_decode_with_remainder() -> None:
    d = decoder()
    got = [x for i in range(len(WIRE)) for x in d.feed(WIRE[i : i + 1])]
    assert got == list(SAMPLES)
    assert d.feed(WIRE[:7]) == []
    assert d.buffered == 7


def test_largest_request_fits_into_a_frame() -> None:
    many = 1 << 18
    request = m.ReduceRequested(1, 0, 0, (ID,) * many, "sum", many, ready=tuple(range(many)))
    assert decoder().feed(codec.encode(request)) == [request]


@given(st.binary(max_size=64))
def test_noise_decoded_raises_protocol_error_or_nothing(noise: bytes) -> None:
    try:
        decoder().feed(frame(noise))
    except ProtocolError:
        return
    if noise:
        msgspec.msgpack.decode(noise, type=Anything)


def test_heartbeat_decoded_is_no_message() -> None:
    beaten = codec.BEAT + codec.encode(m.Forget(1)) + codec.BEAT * 3 + codec.encode(m.Forget(2))
    one = decoder()
    assert one.feed(beaten + codec.BEAT[:3]) == [m.Forget(1), m.Forget(2)]
    assert one.buffered == 3
    assert one.feed(codec.BEAT[3:]) == []
    assert one.buffered == 0


@pytest.mark.parametrize("begins_with", [b"", codec.BEAT])
def test_flipped_bit_in_a_frame_raises_protocol_error(begins_with: bytes) -> None:
    """In a head at once, whatever length it then says: nobody may wait for that."""
    whole = begins_with + codec.encode(SAMPLES[0]) + codec.BEAT
    for bit in range(8 * len(whole)):
        spoiled = bytearray(whole)
        spoiled[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError, match="checksum"):
            decoder().feed(spoiled)


@pytest.mark.parametrize(
    "data",
    [
        frame(b"\xc1"),
        frame(b"\x93\xa6Forget"),
        packed(["Nobody", 1]),
        packed(["Forget"]),
        packed(["Forget", 1, 2]),
        packed(["Forget", -1]),
        packed(["Forget", "1"]),
        packed({"type": "Forget", "operation": 1}),
        packed(["Commit", 1, 1, [1, 0]]),
        packed(["GroupMembers", "g", 1, 0, 2, 1, 1, True, 1, [0, None], [[0, 0, 1 << 20]]]),
        frame(msgspec.msgpack.encode(["Forget", 1]) + b"\x01"),
        head(codec.FRAME_BYTES_MAX + 1),
        bytes(12),
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_malformed_frames_raise_protocol_error(data: bytes) -> None:
    d = decoder()
    with pytest.raises(ProtocolError):
        d.feed(data)
    with pytest.raises(ProtocolError):
        d.feed(codec.encode(m.Forget(1)))  # where a frame begins is no longer known
    assert d.buffered == 0


def test_frame_with_excessive_length_is_refused_immediately() -> None:
    with pytest.raises(ProtocolError, match="frame of 33 bytes"):
        decoder(frame_bytes_max=32).feed(head(33))


def test_decoder_accepts_only_messages_of_the_peer() -> None:
    lost, forget = m.NodeLost(0, 1), m.Forget(1)
    assert codec.manager_decoder().feed(codec.encode(lost)) == [lost]
    assert codec.node_decoder().feed(codec.encode(forget)) == [forget]
    with pytest.raises(ProtocolError):
        codec.manager_decoder().feed(codec.encode(forget))
    with pytest.raises(ProtocolError):
        codec.node_decoder().feed(codec.encode(lost))


def test_message_over_the_frame_limit_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "FRAME_BYTES_MAX", 8)
    with pytest.raises(ValueError, match="NodeJoined of"):
        codec.encode(m.NodeJoined(0, 1, 8))
