"""Faults that strike at a message: just before it leaves, or as it arrives.

Why it exists: many rules matter only if somebody dies between two messages, which a fault at a
random moment meets once in ten thousand runs. The messages of the protocol are known by name, so a
fault can wait for one; the rare ones are waited for as often as the common ones (as in FATE: Gunawi
et al., NSDI 2011).
It must never know: what a message means, which fault comes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from hoplite_mp.protocol.messages import ManagerToNode, NodeToManager
from hoplite_mp.protocol.peers import PeerMessage
from hoplite_mp.protocol.reports import Report
from hoplite_mp.protocol.terms import TermsToManager, TermsToNode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MESSAGES", "Trap", "spring"]

# Messages for tools, and of what no simulated program uses.
UNUSED = {
    "AddWorkers", "ClockAsked", "ClusterEnded", "CountersAsked", "CountersNow", "Credentials",
    "DumpAsked", "LookTold", "Printed", "PrintedTaken", "RelayAsked", "RelayOpened", "RemoveNode",
    "TraceAsked", "TraceRead",
}  # fmt: skip
UNIONS = ManagerToNode, NodeToManager, PeerMessage, Report, TermsToManager, TermsToNode
MESSAGES = sorted({kind.__name__ for union in UNIONS for kind in get_args(union)} - UNUSED)
HEAD_BYTES = 12  # see protocol/codec.py
_length = struct.Struct("<I").unpack_from


@dataclass(eq=False)
class Trap:
    """Waits for the `left`-th message of that name, and strikes. strike: called with the places of
    the host that sends it and of the one that receives it."""

    message: str
    left: int
    arrives: bool  # else: before it leaves
    strike: Callable[[int, int], None]


def spring(traps: list[Trap], data: bytes, ends: tuple[int, int], arrives: bool) -> None:
    """Whole frames are about to leave a host for another, or have arrived there."""
    names: list[str] = []
    for trap in list(traps):
        if trap.arrives is arrives:
            names = names or names_in(data)
            trap.left -= names.count(trap.message)
            if trap.left <= 0:
                traps.remove(trap)
                trap.strike(*ends)


def names_in(data: bytes) -> list[str]:
    """Of the messages in these frames; "" for what is none."""
    found, at = [], 0
    while at + HEAD_BYTES <= len(data):
        (nbytes,) = _length(data, at)
        at += HEAD_BYTES
        found.append(_name_of(data[at : at + nbytes]))
        at += nbytes
    return found


def _name_of(body: bytes) -> str:
    """A body is a MessagePack array that begins with the name."""
    at = 1 if body[:1] < b"\xa0" else 3
    if not body[at:]:
        return ""
    short = body[at] != 0xD9  # up to 31 bytes, whose count is in that byte
    begin = at + 1 if short else at + 2
    nbytes = body[at] & 31 if short else body[at + 1]
    return body[begin : begin + nbytes].decode("ascii", "replace")
