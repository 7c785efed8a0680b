"""The messages to a node about refs that a process hands to another engine (Ray, Dask) as bytes.

Why it exists: the engine keeps the bytes, but the process that pickled the ref may drop it or end.
So the node of the host holds the object for a while.
It must never know: how long that is, what engines do.
"""

from __future__ import annotations

import msgspec

__all__ = ["HoldForeign", "UsersOfNode"]


class HoldForeign(msgspec.Struct, frozen=True, tag="HoldForeign", array_like=True):
    """A ref to this object has just been pickled for another engine. The node holds the object for
    Config.foreign_hold_s from now on. Reply: these seconds; 0.0: the object is gone."""

    oid: int


class UsersOfNode(msgspec.Struct, frozen=True, tag="UsersOfNode", array_like=True):
    """Reply: how many drivers are attached to this node, without the process that started it."""
