"""Messages about clocks, traces and waits: whole after the wire, illegal ones cannot be made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._protocol.codec import Decoder, encode
from hoplite_mp._protocol.diagnostics import (
    ClockAsked,
    DumpAsked,
    LookTold,
    TraceAsked,
    TraceRead,
)
from hoplite_mp._protocol.peers import PeerMessage

if TYPE_CHECKING:
    from collections.abc import Callable

SAMPLES = (
    ClockAsked(1),
    TraceAsked(2, (1 << 63) - 1, "begin"),
    TraceAsked(3, 5, "end"),
    TraceRead(4, 5, 1 << 40),
    DumpAsked(5, True),
    LookTold(6, 1 << 62, b"data", "why not"),
)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_there_and_back(message: Any) -> None:
    (got,) = Decoder(PeerMessage).feed(encode(message))
    assert got == message


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClockAsked(-1),
        lambda: TraceAsked(1, 5, "pause"),
        lambda: TraceAsked(1, 1 << 64, "end"),
        lambda: TraceRead(1, 5, -1),
        lambda: DumpAsked(1, 1),  # type: ignore[arg-type]
        lambda: LookTold(1, -1),
        lambda: LookTold(1, error="x" * (1 << 20)),
    ],
)
def test_what_cannot_be(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()
