"""Messages between nodes for diagnostics: clocks, traces, and dumps of waits.

    requester ── ClockQuery TraceRequest TraceReadRequest DumpRequest ─►  node
              ◄─ DiagnosticsResponse ──

Each node records its part of a trace. At the end of the trace, the node makes one document of its
part, which is read in pieces. This file also defines the format of the document.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec

from hoplite_mp._protocol.fields import TEXT_CHARS_MAX, Message, counts, flags, one_of, text

__all__ = [
    "EVENT",
    "KINDS_OF_EVENTS",
    "OUTCOMES_OF_EVENTS",
    "PIECE_BYTES_MAX",
    "TRACE_STEPS",
    "ClockQuery",
    "DiagnosticsMessage",
    "DiagnosticsResponse",
    "DumpRequest",
    "TraceDocument",
    "TraceReadRequest",
    "TraceRequest",
]

# "begin": record events; "end": stop, and keep the document; "drop": discard the document.
TRACE_STEPS = ("begin", "end", "drop")
# Bytes of a document in one message. Higher: fewer messages; lower: other messages wait less.
# Unprivileged processes can send packets of at most 416 KiB.
PIECE_BYTES_MAX = 128 << 10
# One event of a process, as in cext/shm_layout.h: id, begin_ns, end_ns, kind, outcome, depth, rank,
# name, bytes_in, bytes_out.
EVENT = struct.Struct("<QQQBBHI32sQQ")
KINDS_OF_EVENTS = ("task", "group call")
OUTCOMES_OF_EVENTS = ("running", "done", "failed", "cancelled", "lost", "timeout")


class ClockQuery(Message, frozen=True, tag="ClockAsked"):
    """Requests the time of the receiver's monotonic clock, returned in the answer's `value`."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class TraceRequest(Message, frozen=True, tag="TraceAsked"):
    """Requests a step (TRACE_STEPS) of the sender's trace with the id `trace`. If the step fails,
    the answer's `error` is the reason. After "end" its `value` is the length of the document in
    bytes."""

    number: int
    trace: int
    step: str

    def __post_init__(self) -> None:
        counts(number=self.number, trace=self.trace)
        one_of("step", self.step, TRACE_STEPS)


class TraceReadRequest(Message, frozen=True, tag="TraceRead"):
    """Requests a piece of the trace's document that begins at `offset`."""

    number: int
    trace: int
    offset: int

    def __post_init__(self) -> None:
        counts(number=self.number, trace=self.trace, offset=self.offset)


class DumpRequest(Message, frozen=True, tag="DumpAsked"):
    """Requests a dump of the waits on the receiver's host, returned in the answer's `data`.
    `stacks`: include the stacks of the workers' threads."""

    number: int
    stacks: bool

    def __post_init__(self) -> None:
        counts(number=self.number)
        flags(stacks=self.stacks)


class DiagnosticsResponse(Message, frozen=True, tag="LookTold"):
    """The answer to the request with the same `number`."""

    number: int
    value: int = 0
    data: bytes = b""
    error: str = ""

    def __post_init__(self) -> None:
        counts(number=self.number, value=self.value)
        text("error", self.error, TEXT_CHARS_MAX)


DiagnosticsMessage: TypeAlias = (
    ClockQuery | TraceRequest | TraceReadRequest | DumpRequest | DiagnosticsResponse
)


class TraceDocument(msgspec.Struct, frozen=True):
    """The trace of one node. Times are from the node's monotonic clock."""

    host: str
    host_id: int
    begin_ns: int
    end_ns: int
    # (client slot, pid, EVENTs) in order; a process may have several entries.
    events: list[tuple[int, int, bytes]]
    # Local ids of inbound tasks -> their cluster-wide ids.
    inbound_tasks: dict[int, bytes]
    # Events of the node itself: (kind, name, begin_ns, end_ns, details).
    trace_events: list[tuple[str, str, int, int, dict[str, Any]]]
    dropped: int  # number of dropped (oldest) events
    # pid -> name of the process's actor.
    actors: dict[int, str] = {}
