"""A pickle stream that is being written, and what goes beside it: buffers and refs.

Both picklers write into it, and the modules that put arrays beside a stream (`out_of_band`,
`borrowed`) ask it for the places of refs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pickle

    from hoplite_mp._common.ref import ObjectRef


class PickleStream:
    """A pickle stream: its bytes, the buffers beside it, and the refs that it names."""

    __slots__ = ("buffers", "chunks", "dependencies", "index", "refs", "write")

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.buffers: list[pickle.PickleBuffer] = []
        self.refs: list[ObjectRef[Any]] = []
        self.dependencies: dict[ObjectRef[Any], None] = {}  # a set in order
        self.index: dict[ObjectRef[Any], int] = {}
        self.write = self.chunks.append  # Picklers write to this object as if it were a file.

    def index_of(self, ref: ObjectRef[Any]) -> int:
        """The place of `ref` in the payload's list of refs."""
        index = self.index.setdefault(ref, len(self.refs))
        if index == len(self.refs):
            self.refs.append(ref)
        return index
