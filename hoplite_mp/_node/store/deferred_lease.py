"""Blocks of the store that are a member's as soon as its Group's call is committed.

Why it exists: the engine may commit a call before this process knows (groups/engine_commit.py), and
the member may return a block of the result at once. The engine's cells lie in it until this process
has heard of the commit, so it is freed only then.
It must never know: calls, members, what lies in the blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.store.budget import PROMISED

if TYPE_CHECKING:
    from hoplite_mp._node.store.budget import Store

__all__ = ["free_if_returned", "keep_promise", "promise"]


def promise(store: Store, payload: int) -> bool:
    """Keeps a block of this node until `keep_promise`. False: it has been promised already."""
    if store.leases.get(payload) != NODE_SLOT:
        return False
    store.leases[payload] = PROMISED
    return True


def keep_promise(store: Store, payload: int, slot: int) -> None:
    """Leases a promised block to that slot; NODE_SLOT: to nobody but this node."""
    store.leases[payload] = slot


def free_if_returned(store: Store, payload: int) -> None:
    """Frees a block that its member had returned while it was still promised."""
    if payload in store.leases and store.client.block_owner(payload) == 0:
        store.free(payload)
