"""What workers print, on its way to a driver: marks in a worker's pipes, lines between nodes.

    worker ── lines and marks ─► its node ── Printed LastLinesSent ─►  driver's node ─► driver
                                          ◄─ PrintedTaken LastLinesAsked ──

An *audience* is a driver, named by the home of its host; 0 is the driver of the host that says it.
One that has attached to a node is named by that home too, but for the lowest 16 bits, which the
node gives it for life (`audience_name`). A worker that is about to serve another audience than
before writes a mark into both of its pipes: what follows it in a pipe is for that one. So a line
finds its driver even if its node reads it when the worker runs another task. A mark contains the
host's random home, so nothing that a program prints is taken for one by accident.

This module must never know how messages travel, nor who reads a pipe.
"""

from __future__ import annotations

import msgspec

from hoplite_mp.protocol.fields import NODES_MAX, Message, between, counts, numbers

__all__ = [
    "AUDIENCES_MAX",
    "FAR_BYTES_MAX",
    "LINES_MARK",
    "LINE_BYTES_MAX",
    "MARK_BYTES",
    "LastLinesAsked",
    "LastLinesSent",
    "MarkLines",
    "Printed",
    "PrintedTaken",
    "audience_name",
    "bytes_of",
    "mark",
    "mark_head",
    "same_host",
]

# The longest line that may be set: more in one piece would hold up the other messages of its wire.
LINE_BYTES_MAX = 1 << 20
# Bytes of lines on the way from one node to one driver elsewhere before that has taken them.
# Higher: bursts do not wait for an answer; lower: less memory at the driver's node per other node.
FAR_BYTES_MAX = 256 << 10
PRINTED_BYTES_MAX = 2 * LINE_BYTES_MAX  # one read of a pipe, with the line that it completes
PRINTED_LINES_MAX = 1 << 17
# What a line costs beside its bytes: many empty ones are not for nothing.
LINE_BYTES_EXTRA = 16
SLOTS_MAX = 1 << 8
STREAMS = (1, 2)  # stdout, stderr
LINES_MARK = 0  # in place of these, between node and driver: the answer to MarkLines

# Attached drivers that a host tells apart; the names of the first are given again after so many.
AUDIENCES_MAX = (1 << 16) - 1

_MARK = "\0hoplite_mp %016x "
MARK_BYTES = len(_MARK % 0) + 16  # without the line's end behind it


def audience_name(home: int, number: int) -> int:
    """Of the attached driver of that number, from 0 on; never the home itself."""
    low = (home + 1 + number % AUDIENCES_MAX) & 0xFFFF
    return home & ~0xFFFF | low


def same_host(audience: int, home: int) -> bool:
    """Is it a driver of that host?"""
    return audience >> 16 == home >> 16


def mark_head(home: int) -> bytes:
    """How every mark of that host begins."""
    return (_MARK % home).encode()


def mark(home: int, audience: int) -> bytes:
    """Short enough for one write that cannot be torn apart (PIPE_BUF)."""
    return mark_head(home) + b"%016x\n" % audience


def bytes_of(lines: list[bytes]) -> int:
    """What lines count, for both sides of a wire alike."""
    return sum(map(len, lines)) + LINE_BYTES_EXTRA * len(lines)


class MarkLines(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Driver to its node: that number is wanted among the lines for this driver, behind all that
    workers of this host have written so far. No reply but that."""

    number: int


class Printed(Message, frozen=True):
    """Lines of one worker of the sender's host for a driver of the receiver's. `stream`: 1 stdout,
    2 stderr. `audience`: an attached driver; 0: the one that the host belongs to. At most
    FAR_BYTES_MAX are on the way when another message of lines is sent."""

    slot: int
    stream: int
    lines: list[bytes]
    audience: int = 0

    def __post_init__(self) -> None:
        counts(audience=self.audience)
        between("slot", self.slot, 0, SLOTS_MAX - 1)
        between("stream", self.stream, min(STREAMS), max(STREAMS))
        between("number of lines", len(self.lines), 1, PRINTED_LINES_MAX)
        between("bytes of lines", sum(map(len, self.lines)), 0, PRINTED_BYTES_MAX)


class PrintedTaken(Message, frozen=True):
    """A driver of the sender's has taken so many bytes (`bytes_of`) of the receiver's lines."""

    nbytes: int
    audience: int = 0

    def __post_init__(self) -> None:
        counts(nbytes=self.nbytes, audience=self.audience)


class LastLinesAsked(Message, frozen=True):
    """A driver of the sender's leaves (`audience`: as in Printed). The receiver sends what its
    workers have written for it, also lines without an end, and then LastLinesSent."""

    audience: int = 0

    def __post_init__(self) -> None:
        counts(audience=self.audience)


class LastLinesSent(Message, frozen=True):
    """The sender has no more lines for that driver of the receiver's. `others`: homes of hosts to
    which it has sent tasks of that driver's tasks: they may have some."""

    others: tuple[int, ...] = ()
    audience: int = 0

    def __post_init__(self) -> None:
        counts(audience=self.audience)
        between("number of others", len(self.others), 0, NODES_MAX)
        numbers("others", self.others)
