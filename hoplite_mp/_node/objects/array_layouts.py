"""Layouts: the shape and dtype of an array as text, for messages between nodes.

A node that folds arrays of other hosts must know their sizes, and the manager must see whether
sources fit together, before a byte moves. The manager only compares these texts, and errors show
them to users.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hoplite_mp import _serialize
from hoplite_mp._common.object_states import AWAY
from hoplite_mp._common.reduction import has_kernel
from hoplite_mp._protocol.fields import LAYOUT_BYTES_MAX

if TYPE_CHECKING:
    from hoplite_mp._node.objects.remote_objects import RemoteObjects
    from hoplite_mp._node.objects.results import ResultWriter

__all__ = ["can_fold", "layout_of", "layout_words", "parse_layout", "payload_layout"]

_BETWEEN = " and dtype "
_LAYOUT = re.compile(r"shape \((?:(\d{1,20}(?:, \d{1,20})*),?)?\) and dtype (.+)", re.ASCII)
# How much of a spilled payload is read at first. Its head is longer if very many sources have
# contributed to it: then so many times as much is read, until it is whole.
HEAD_BYTES, HEAD_GROWTH = 16 << 10, 8


def payload_layout(payload: memoryview) -> bytes:
    """The layout of an array or number; b"" for other objects, and if the text is too long."""
    info = _serialize.describe_array(payload)
    if info is None:
        return b""
    text = f"shape {info.shape}{_BETWEEN}{info.dtype_name}".encode()
    return text if len(text) <= LAYOUT_BYTES_MAX else b""


def parse_layout(layout: bytes) -> tuple[tuple[int, ...], str]:
    """Returns (shape, name of the dtype). ValueError: payload_layout has not made that text."""
    found = _LAYOUT.fullmatch(layout.decode())
    if found is None:
        raise ValueError(f"this is no layout: {layout!r}")
    return tuple(map(int, found[1].split(", "))) if found[1] else (), found[2]


def layout_words(layout: bytes) -> str:
    """A layout as errors show it, with the dtype's name in NumPy, as errors of one host have it."""
    try:
        shape, name = parse_layout(layout)
        return f"shape {shape}{_BETWEEN}{_serialize.named_dtype(name)}"
    except (ImportError, ValueError):  # ml_dtypes is missing here, or another host sent nonsense
        return layout.decode(errors="replace")


def layout_of(results: ResultWriter, remote_objects: RemoteObjects, oid: int) -> bytes:
    """The layout of an object that is ready on this host, or known to be on another one."""
    got = results.client.view(oid)
    if not isinstance(got, int):
        return payload_layout(memoryview(got))
    remote = remote_objects.by_oid.get(oid)
    if remote is not None:
        return remote.layout
    if got not in AWAY:
        return b""
    nbytes = HEAD_BYTES
    while (head := results.store.read_spilled(oid, 0, nbytes)) is not None:
        try:
            return payload_layout(memoryview(head))
        except ValueError:
            if len(head) < nbytes:  # that is all of it
                raise
        nbytes *= HEAD_GROWTH
    return b""


def can_fold(op: str, layout: bytes) -> bool:
    """Whether there is a kernel; without one NumPy folds the arrays on one node."""
    return bool(layout) and has_kernel(op, parse_layout(layout)[1]) is not None
