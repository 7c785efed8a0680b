"""Which of several streams over one link goes first: contributions before results of folds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.engine_hosts import DATA, REQUEST, EngineHost, Frame, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 64 * 1024
BEFORE_FOLDED_MAX = 16  # as in cext/engine_state.h
GIVEN, FOLDED = (1, 0, 0, 0), (1, 0, 0, 1)


@pytest.fixture
def host() -> Iterator[EngineHost]:
    made = EngineHost(5, block_bytes_max=BLOCK)
    yield made
    made.engine.stop()


def order(host: EngineHost, given: int, folded: int) -> list[bool]:
    """Of the blocks in the order in which a peer receives them: whether each is of a fold's result.
    It has asked for both cells, of so many blocks, at once, and for the result first."""
    peer = Peer(host)
    contribution = np.ones(given * BLOCK // 4, np.float32)
    host.engine.cell(GIVEN, contribution.view(np.uint8), filled=True)
    sources = [np.full(folded * BLOCK // 4, i, np.float32) for i in (1, 2)]
    cells = [host.engine.cell(None, one.view(np.uint8), filled=True) for one in sources]
    total = np.zeros_like(sources[0])
    result = host.engine.cell(FOLDED, total.view(np.uint8))
    host.engine.fold(result, cells, "sum", "float32")
    host.filled(result)
    requests = [
        Frame(REQUEST, FOLDED, 1 << 16, 0, folded * BLOCK, length=0, block_crc=0),
        Frame(REQUEST, GIVEN, 2 << 16 | 1, 0, given * BLOCK, length=0, block_crc=0),
    ]
    peer.socket.sendall(b"".join(one.pack() for one in requests))
    blocks = [peer.receive() for _ in range(given + folded)]
    assert all(block.type == DATA for block in blocks)
    peer.close()
    return [block.key == FOLDED for block in blocks]


def test_contributions_go_before_results(host: EngineHost) -> None:
    assert order(host, given=8, folded=8) == [False] * 8 + [True] * 8


def test_no_result_is_kept_back_for_ever(host: EngineHost) -> None:
    found = order(host, given=3 * BEFORE_FOLDED_MAX, folded=8)
    turn = [False] * BEFORE_FOLDED_MAX + [True]
    assert found == 3 * turn + [True] * 5
