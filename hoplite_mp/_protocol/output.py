"""The output of workers on its way to a driver: marks in a worker's pipes, lines between nodes.

    worker ── lines and marks ─► its node ── Printed LastLinesSent ─►  driver's node ─► driver
                                          ◄─ PrintedTaken LastLinesAsked ──

An *output owner* is a driver, named by the id of its host; 0 is the driver of the sender's host. A
driver that has attached to a node has the same name except for the lowest 16 bits, which the node
gives it for life (`output_owner_name`). Before a worker serves another output owner, it writes a
mark into both of its pipes; what follows the mark in a pipe is for the new output owner. So a line
finds its driver even if the node reads it when the worker already runs another task. A mark
contains the host's random id, so no output of a program is taken for a mark by accident.
"""

from __future__ import annotations

import msgspec

from hoplite_mp._protocol.fields import NODES_MAX, Message, between, counts, numbers

__all__ = [
    "AUDIENCES_MAX",
    "LINES_MARK",
    "LINE_BYTES_MAX",
    "MARK_BYTES",
    "REMOTE_BYTES_MAX",
    "LastLinesAsked",
    "LastLinesSent",
    "MarkLines",
    "Printed",
    "PrintedTaken",
    "bytes_of",
    "mark",
    "mark_head",
    "output_owner_name",
    "same_host",
]

# The longest line that may be configured. A longer one would delay other messages of its
# connection.
LINE_BYTES_MAX = 1 << 20
# Bytes of lines that a node sends to a driver of another host before the driver has taken them.
# Higher: bursts do not wait for an answer; lower: less memory at the driver's node per other node.
REMOTE_BYTES_MAX = 256 << 10
PRINTED_BYTES_MAX = 2 * LINE_BYTES_MAX  # one read of a pipe, with the line that it completes
PRINTED_LINES_MAX = 1 << 17
# Counted for a line besides its bytes, because many empty lines also take memory.
LINE_BYTES_EXTRA = 16
SLOTS_MAX = 1 << 8
STREAMS = (1, 2)  # stdout, stderr
LINES_MARK = 0  # in place of these, between node and driver: the answer to MarkLines

# How many attached drivers of a host have different names; after so many the names are used again.
AUDIENCES_MAX = (1 << 16) - 1

_MARK = "\0hoplite_mp %016x "
MARK_BYTES = len(_MARK % 0) + 16  # without the end of the line


def output_owner_name(host_id: int, number: int) -> int:
    """The name of the attached driver with that number, from 0 on; never the host id itself."""
    low = (host_id + 1 + number % AUDIENCES_MAX) & 0xFFFF
    return host_id & ~0xFFFF | low


def same_host(output_owner: int, host_id: int) -> bool:
    """Is the output owner a driver of that host?"""
    return output_owner >> 16 == host_id >> 16


def mark_head(host_id: int) -> bytes:
    """The beginning of every mark of that host."""
    return (_MARK % host_id).encode()


def mark(host_id: int, output_owner: int) -> bytes:
    """A mark. It is short enough to be written to a pipe in one piece (PIPE_BUF)."""
    return mark_head(host_id) + b"%016x\n" % output_owner


def bytes_of(lines: list[bytes]) -> int:
    """The size at which both sides of a connection count these lines."""
    return sum(map(len, lines)) + LINE_BYTES_EXTRA * len(lines)


class MarkLines(msgspec.Struct, frozen=True, tag="MarkLines", array_like=True):
    """Driver to its node: put that number among the lines for this driver, after all that workers
    of this host have written so far. There is no other reply."""

    number: int


class Printed(Message, frozen=True, tag="Printed"):
    """Lines of one worker of the sender's host for a driver of the receiver's host. `stream`: 1
    stdout, 2 stderr. `output_owner`: an attached driver; 0: the driver that started the host.
    Another message of lines is only sent while at most REMOTE_BYTES_MAX are on the way."""

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


class PrintedTaken(Message, frozen=True, tag="PrintedTaken"):
    """A driver of the sender's host has taken `nbytes` (see `bytes_of`) of the receiver's lines."""

    nbytes: int
    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(nbytes=self.nbytes, output_owner=self.output_owner)


class LastLinesAsked(Message, frozen=True, tag="LastLinesAsked"):
    """A driver of the sender's host leaves (`output_owner`: as in Printed). The receiver sends what
    its workers have written for it, also lines without an end, and then LastLinesSent."""

    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(output_owner=self.output_owner)


class LastLinesSent(Message, frozen=True, tag="LastLinesSent"):
    """The sender has no more lines for that driver of the receiver's host. `others`: ids of hosts
    to which it has sent tasks that the driver's tasks submitted; these may have lines."""

    others: tuple[int, ...] = ()
    output_owner: int = 0

    def __post_init__(self) -> None:
        counts(output_owner=self.output_owner)
        between("number of others", len(self.others), 0, NODES_MAX)
        numbers("others", self.others)
