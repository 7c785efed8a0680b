"""Messages about clocks, traces and waits: whole after the wire, illegal ones cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._protocol.codec import Decoder, encode
from hoplite_mp._protocol.diagnostics import (
    ClockQuery,
    DiagnosticsResponse,
    DumpRequest,
    TraceReadRequest,
    TraceRequest,
)
from hoplite_mp._protocol.peers import PeerMessage

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = (
    ClockQuery(1),
    TraceRequest(2, (1 << 63) - 1, "begin"),
    TraceRequest(3, 5, "end"),
    TraceReadRequest(4, 5, 1 << 40),
    DumpRequest(5, True),
    DiagnosticsResponse(6, 1 << 62, b"data", "why not"),
)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_diagnostics_messages_encoded_decode_equally(message: Any) -> None:
    (got,) = Decoder(PeerMessage).feed(encode(message))
    assert got == message


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClockQuery(-1),
        lambda: TraceRequest(1, 5, "pause"),
        lambda: TraceRequest(1, 1 << 64, "end"),
        lambda: TraceReadRequest(1, 5, -1),
        lambda: DumpRequest(1, 1),  # type: ignore[arg-type]
        lambda: DiagnosticsResponse(1, -1),
        lambda: DiagnosticsResponse(1, error="x" * (1 << 20)),
    ],
)
def test_diagnostics_messages_with_illegal_fields_raise(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
