"""What a worker tells its node of the initializer of its pool.

Why it exists: a pool whose initializer raises is broken; one whose initializer has returned in any
worker goes on, whatever kills its workers later.
It must never know: what the node makes of it.
"""

from __future__ import annotations

import msgspec

__all__ = ["SetUp", "SetupFailed"]


class SetUp(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This worker's initializer has returned. No reply."""


class SetupFailed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This worker's initializer raised: what, and its traceback. Reply: None."""

    summary: str
    text: str
