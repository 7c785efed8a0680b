"""What a process tells its node of refs that it hands to another engine (Ray, Dask) as bytes.

Why it exists: the engine keeps the bytes, and who has pickled the ref may drop it or end: so the
node of the host holds the object for a while.
It must never know: how long that is, what engines do.
"""

from __future__ import annotations

import msgspec

__all__ = ["HoldForeign", "UsersOfNode"]


class HoldForeign(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A ref to this object has just been pickled for another engine: the node is to hold it for
    Config.foreign_hold_s from now. Reply: that many seconds; 0.0: the object is gone."""

    oid: int


class UsersOfNode(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How many processes of this host take part through its node, beside the one that keeps it.
    Reply: that number."""
