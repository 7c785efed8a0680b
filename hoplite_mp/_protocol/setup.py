"""The messages of a worker to its node about the initializer of its pool.

Why it exists: a pool whose initializer raises is broken. A pool whose initializer has returned in
any worker goes on, even if its workers are killed later.
It must never know: how the node uses these messages.
"""

from __future__ import annotations

import msgspec

__all__ = ["SetUp", "SetupFailed"]


class SetUp(msgspec.Struct, frozen=True, tag="SetUp", array_like=True):
    """This worker's initializer has returned. No reply."""


class SetupFailed(msgspec.Struct, frozen=True, tag="SetupFailed", array_like=True):
    """This worker's initializer raised. `summary`: the exception; `text`: its traceback. Reply:
    None."""

    summary: str
    text: str
