"""A pickle stream while it is written, with what does not go into it: buffers and refs.

Why it exists: both picklers write into it, and what stands beside a stream (`aside`, `lent`) asks
it for the places of refs. It must never know who writes it, nor what becomes of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pickle

    from hoplite_mp.ref import ObjectRef


class Stream:
    """A written pickle stream: what stays inside, the buffers beside it, the refs it names."""

    __slots__ = ("buffers", "chunks", "dependencies", "index", "refs", "write")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self.refs: list[ObjectRef[Any]] = []
        self.dependencies: dict[ObjectRef[Any], None] = {}  # a set in order
        self.index: dict[ObjectRef[Any], int] = {}
        self.write = self.chunks.append  # The picklers take this object for their file.

    def index_of(self, ref: ObjectRef[Any]) -> int:
        """The place of `ref` in the payload's list of refs."""
        index = self.index.setdefault(ref, len(self.refs))
        if index == len(self.refs):
            self.refs.append(ref)
        return index
