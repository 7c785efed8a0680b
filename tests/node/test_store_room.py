"""How the store makes room before anything is spilled, and what it keeps for errors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._common.object_states import NODE_SLOT
from hoplite_mp._node.store import budget as store_module
from hoplite_mp._node.store.budget import ERROR_SHARE, HEAD
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    made.store.limit = MIB
    yield made
    made.close()


def test_full_store_has_a_reserve_for_errors(host: ShmHost) -> None:
    """What they take is given back with them."""
    store = host.store
    assert store.lease(MIB - HEAD, NODE_SLOT) is not None
    nbytes = PAGE - HEAD
    assert store.lease(nbytes, NODE_SLOT) is None
    leased: list[int] = []
    while (payload := store.lease_error(nbytes, NODE_SLOT)) is not None:
        assert store.size_of(payload) == nbytes
        leased.append(payload)
    assert len(leased) == MIB // ERROR_SHARE // nbytes
    store.free(leased.pop())
    assert store.lease_error(nbytes, NODE_SLOT) is not None
    assert store.lease_error(nbytes, NODE_SLOT) is None


def test_free_pages_are_returned_to_a_system_without_memory(
    host: ShmHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = host.store
    store.reserve_bytes = 0
    freed = store.lease(MIB // 4, NODE_SLOT)
    assert store.lease(MIB // 4, NODE_SLOT) is not None
    assert freed is not None
    store.free(freed)
    assert store.arena.warm >= MIB // 4
    total = MIB // 4 * 3
    monkeypatch.setattr(store_module, "available_bytes", lambda: total - store.arena.resident)
    monkeypatch.setattr(store, "_untouched", lambda: 0)
    assert store.lease(MIB // 8 * 3, NODE_SLOT) is not None
    assert not store.arena.warm


@pytest.mark.parametrize("left", [0, 1, 2])
def test_only_needed_spans_are_revoked(host: ShmHost, left: int) -> None:
    clients = [host.with_span() for _ in range(3)]
    spans = host.store.spans
    host.store.revoke_spans(lambda: len(spans) == left)
    assert len(spans) == left
    assert len({client.slot for client in clients}) == 3


@pytest.mark.parametrize("untouched", [0, PAGE])
def test_store_leaves_memory_for_other_programs(
    host: ShmHost, monkeypatch: pytest.MonkeyPatch, untouched: int
) -> None:
    """Beside pages that are promised already; spans may take of it."""
    store, size = host.store, host.store.config.span_bytes
    store.reserve_bytes = 4 * size
    free = 0
    monkeypatch.setattr(store, "_untouched", lambda: untouched)
    monkeypatch.setattr(store_module, "available_bytes", lambda: free)
    free = size + untouched + 4 * size - 1
    assert store.lease(size - HEAD, NODE_SLOT) is None
    free += 1
    assert store.lease(size - HEAD, NODE_SLOT) is not None
    free = size + untouched + size - 1
    assert store.lease_span(NODE_SLOT + 1) is None
    free += 1
    assert store.lease_span(NODE_SLOT + 1) is not None
