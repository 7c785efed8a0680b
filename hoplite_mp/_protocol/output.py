"""Forwarding of workers' output to drivers: marks in a worker's pipes, lines between nodes.

    worker ── lines and marks ─► its node ── OutputLines OutputFlushed ─►  driver's node ─► driver
                                          ◄─ OutputAck OutputFlushRequest ──

An *output owner* is a driver, named by the id of its host; 0 is the driver of the sender's host.
The name of an attached driver differs from its host's id only in the lowest 16 bits, which the node
assigns when the driver attaches (`output_owner_name`). Before a worker serves another output owner,
it writes a mark into both of its pipes; the bytes after the mark are for the new owner. So a line
reaches its driver even if the worker is already running another task when the node reads it. A mark
contains the host's random id, so output is not mistaken for a mark by accident.
"""

from __future__ import annotations

import msgspec

from hoplite_mp._protocol.fields import NODES_MAX, Message, between, counts, numbers

__all__ = [
    "ATTACHED_OWNERS_MAX",
    "LINES_MARK",
    "LINE_BYTES_MAX",
    "MARK_BYTES",
    "REMOTE_BYTES_MAX",
    "MarkOutput",
    "OutputAck",
    "OutputFlushRequest",
    "OutputFlushed",
    "OutputLines",
    "bytes_of",
    "mark",
    "mark_head",
    "output_owner_name",
    "same_host",
]

# Maximum of Config.output_line_bytes_max. Longer lines would delay other messages on the same
# connection.
LINE_BYTES_MAX = 1 << 20
# Maximum number of unacknowledged bytes from a node to a driver on another host. Higher: bursts of
# output do not wait for an acknowledgement. Lower: the driver's node needs less memory for each
# other node.
REMOTE_BYTES_MAX = 256 << 10
PRINTED_BYTES_MAX = 2 * LINE_BYTES_MAX  # one read of a pipe, plus the line that it completes
PRINTED_LINES_MAX = 1 << 17
# Added to the size of each line, because even empty lines take memory.
LINE_BYTES_EXTRA = 16
SLOTS_MAX = 1 << 8
STREAMS = (1, 2)  # stdout, stderr
LINES_MARK = 0  # instead of a stream, between node and driver: the answer to MarkOutput

# Number of distinct names for a host's attached drivers. After that, names are reused.
ATTACHED_OWNERS_MAX = (1 << 16) - 1

_MARK = "\0hoplite_mp %016x "
MARK_BYTES = len(_MARK % 0) + 16  # without the newline


def output_owner_name(host_id: int, number: int) -> int:
    """The name of the attached driver with that number (at least 0); never the host id itself."""
    low = (host_id + 1 + number % ATTACHED_OWNERS_MAX) & 0xFFFF
    return host_id & ~0xFFFF | low


def same_host(output_owner: int, host_id: int) -> bool:
    """Whether the output owner is a driver of that host."""
    return output_owner >> 16 == host_id >> 16


def mark_head(host_id: int) -> bytes:
    """The beginning of every mark of that host."""
    return (_MARK % host_id).encode()


def mark(host_id: int, output_owner: int) -> bytes:
    """A mark, short enough for an atomic write to a pipe (PIPE_BUF)."""
    return mark_head(host_id) + b"%016x\n" % output_owner


def bytes_of(lines: list[bytes]) -> int:
    """The size of these lines in the accounting of both sides."""
    return sum(map(len, lines)) + LINE_BYTES_EXTRA * len(lines)


class MarkOutput(msgspec.Struct, frozen=True, tag="MarkLines", array_like=True):
    """From a driver to its node: insert `number` into the lines for this driver, after all lines
    that workers on this host have written so far. No other reply."""

    number: int


class OutputLines(Message, frozen=True, tag="Printed"):
    """Lines from a worker on the sender's host for a driver on the receiver's host. `stream`: 1
    stdout, 2 stderr. `output_owner`: an attached driver; 0: the driver that started the host. At
    most REMOTE_BYTES_MAX bytes are in transit."""

    slot: int
    stream: int
    lines: list[bytes]
    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(output_owner=self.output_owner)
        between("slot", self.slot, 0, SLOTS_MAX - 1)
        between("stream", self.stream, min(STREAMS), max(STREAMS))
        between("number of lines", len(self.lines), 1, PRINTED_LINES_MAX)
        between("bytes of lines", sum(map(len, self.lines)), 0, PRINTED_BYTES_MAX)


class OutputAck(Message, frozen=True, tag="PrintedTaken"):
    """A driver on the sender's host has received `nbytes` (see `bytes_of`) of the receiver's
    lines."""

    nbytes: int
    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(nbytes=self.nbytes, output_owner=self.output_owner)


class OutputFlushRequest(Message, frozen=True, tag="LastLinesAsked"):
    """A driver on the sender's host is leaving (`output_owner`: as in OutputLines). The receiver
    sends the rest of its workers' output for this driver, including incomplete lines, then
    OutputFlushed."""

    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(output_owner=self.output_owner)


class OutputFlushed(Message, frozen=True, tag="LastLinesSent"):
    """The sender has no more lines for that driver on the receiver's host. `others`: ids of hosts
    that may have more, because the sender has sent nested tasks of the driver to them."""

    others: tuple[int, ...] = ()
    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(output_owner=self.output_owner)
        between("number of others", len(self.others), 0, NODES_MAX)
        numbers("others", self.others)
