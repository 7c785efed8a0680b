"""What nodes say to each other for people who look: clocks, traces, and who waits for what.

    looker ── ClockAsked TraceAsked TraceRead DumpAsked ─►  node
           ◄─ LookTold ──

A trace is written down by each node for itself; at its end it is one document, which is read in
pieces. This file also says what such a document looks like.

This module must never know how messages travel, nor what anybody does with them.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import msgspec

from hoplite_mp.protocol.fields import TEXT_CHARS_MAX, Message, counts, flags, one_of, text

__all__ = [
    "EVENT",
    "KINDS_OF_EVENTS",
    "OUTCOMES_OF_EVENTS",
    "PIECE_BYTES_MAX",
    "TRACE_STEPS",
    "ClockAsked",
    "DumpAsked",
    "LookMessage",
    "LookTold",
    "TraceAsked",
    "TraceDocument",
    "TraceRead",
]

# "begin": write down what happens; "end": stop, and keep the document; "drop": it is not needed.
TRACE_STEPS = ("begin", "end", "drop")
# Of a document in one message. Higher: fewer messages; lower: shorter turns for the others. What a
# system without privileges gives a packet between processes is 416 KiB.
PIECE_BYTES_MAX = 128 << 10
# One event of a process, as cext/shm_layout.h draws it: id, begin_ns, end_ns, kind, outcome, depth,
# rank, name.
EVENT = struct.Struct("<QQQBBHI32s")
KINDS_OF_EVENTS = ("task", "group call")
OUTCOMES_OF_EVENTS = ("running", "done", "failed", "cancelled", "lost", "timeout")


class ClockAsked(Message, frozen=True):
    """What does the receiver's monotonic clock show? The answer's value."""

    number: int

    def __post_init__(self) -> None:
        counts(number=self.number)


class TraceAsked(Message, frozen=True):
    """A step of that trace of the sender's. The answer: why it cannot be; after "end" the bytes of
    the document."""

    number: int
    trace: int
    step: str

    def __post_init__(self) -> None:
        counts(number=self.number, trace=self.trace)
        one_of("step", self.step, TRACE_STEPS)


class TraceRead(Message, frozen=True):
    """A piece of that document from `offset` on is wanted."""

    number: int
    trace: int
    offset: int

    def __post_init__(self) -> None:
        counts(number=self.number, trace=self.trace, offset=self.offset)


class DumpAsked(Message, frozen=True):
    """What does everybody on the receiver's host wait for? The answer's data. `stacks`: also where
    the workers' threads stand."""

    number: int
    stacks: bool

    def __post_init__(self) -> None:
        counts(number=self.number)
        flags(stacks=self.stacks)


class LookTold(Message, frozen=True):
    """The answer to the question with that number."""

    number: int
    value: int = 0
    data: bytes = b""
    error: str = ""

    def __post_init__(self) -> None:
        counts(number=self.number, value=self.value)
        text("error", self.error, TEXT_CHARS_MAX)


LookMessage: TypeAlias = ClockAsked | TraceAsked | TraceRead | DumpAsked | LookTold


class TraceDocument(msgspec.Struct, frozen=True):
    """What one node has written down. Times are its own monotonic clock's."""

    host: str
    home: int
    begin_ns: int
    end_ns: int
    # (client slot, pid, EVENTs) in order; a process may stand there many times.
    events: list[tuple[int, int, bytes]]
    # Local ids of tasks that came from other hosts -> the ids under which all know them.
    guests: dict[int, bytes]
    # (kind, name, begin_ns, end_ns, more), of the node itself.
    notes: list[tuple[str, str, int, int, dict[str, Any]]]
    dropped: int  # the oldest, for want of room
    # pid -> how the actor is called whose process it was.
    actors: dict[int, str] = {}
