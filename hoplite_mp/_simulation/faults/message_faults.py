"""Faults that are triggered by a message: just before it is sent, or when it arrives.

Many bugs occur only if a process dies between two given messages. A fault at a random time hits
this moment once in ten thousand runs. So a fault can wait for a message with a given tag. Rare
messages are chosen as often as common ones (as in FATE: Gunawi et al., NSDI 2011).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from hoplite_mp._protocol.diagnostics import DiagnosticsMessage
from hoplite_mp._protocol.membership import ClusterEnded, Credentials, Report
from hoplite_mp._protocol.messages import ManagerToNode, NodeToManager
from hoplite_mp._protocol.output import OutputAck, OutputLines
from hoplite_mp._protocol.peer_hosts import (
    AddPeerWorkers,
    CountersQuery,
    CountersReport,
    RelayOpened,
    RelayRequest,
    RemoveNode,
)
from hoplite_mp._protocol.peers import PeerMessage
from hoplite_mp._protocol.terms import TermsToManager, TermsToNode

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["MESSAGES", "MessageFault", "strike_at_messages"]

# Messages that only tools send, and messages that no simulated program causes.
UNUSED = {
    AddPeerWorkers, ClusterEnded, CountersQuery, CountersReport, Credentials, OutputAck,
    OutputLines, RelayOpened, RelayRequest, RemoveNode, *get_args(DiagnosticsMessage),
}  # fmt: skip
UNIONS = ManagerToNode, NodeToManager, PeerMessage, Report, TermsToManager, TermsToNode
# Former tags of renamed messages. Messages are still sorted by these tags, so that a seed that has
# failed replays the same run.
DRAWN_AS = {
    "OwnerAsked": "HomeAsked", "OwnerTold": "HomeTold", "OwnersKnown": "HomesKnown",
    "OwnersNamed": "HomesNamed",
}  # fmt: skip
MESSAGES = sorted(
    {
        kind.__struct_config__.tag
        for union in UNIONS
        for kind in get_args(union)
        if kind not in UNUSED
    },
    key=lambda tag: DRAWN_AS.get(tag, tag),
)
HEAD_BYTES = 12  # see _protocol/codec.py
_length = struct.Struct("<I").unpack_from


@dataclass(eq=False)
class MessageFault:
    """Calls `strike` at the `left`-th message with the tag ("": any message), and passes the
    machines of the message's sender and receiver."""

    message: str
    left: int
    arrives: bool  # True: when the message arrives; False: just before it is sent
    strike: Callable[[int, int], None]


def strike_at_messages(
    message_faults: list[MessageFault], data: bytes, ends: tuple[int, int], arrives: bool
) -> None:
    """Triggers the faults for complete frames that are about to be sent or have arrived."""
    tags: list[str] = []
    for message_fault in list(message_faults):
        if message_fault.arrives is arrives:
            tags = tags or tags_in(data)
            message_fault.left -= (
                tags.count(message_fault.message) if message_fault.message else len(tags)
            )
            if message_fault.left <= 0:
                message_faults.remove(message_fault)
                sender, receiver = ends
                message_fault.strike(sender, receiver)


def tags_in(data: bytes) -> list[str]:
    """Returns the tags of the messages in these frames; "" for anything else."""
    found, at = [], 0
    while at + HEAD_BYTES <= len(data):
        (nbytes,) = _length(data, at)
        at += HEAD_BYTES
        found.append(_tag_of(data[at : at + nbytes]))
        at += nbytes
    return found


def _tag_of(body: bytes) -> str:
    """The tag of a message: a body is a MessagePack array that begins with it."""
    at = 1 if body[:1] < b"\xa0" else 3
    if not body[at:]:
        return ""
    short = body[at] != 0xD9  # a tag of up to 31 bytes, whose length is in this byte
    begin = at + 1 if short else at + 2
    nbytes = body[at] & 31 if short else body[at + 1]
    return body[begin : begin + nbytes].decode("ascii", "replace")
