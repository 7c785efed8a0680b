"""Which checksum goes with a block: computed once where bytes cannot change, each time elsewhere.

Tests spoil a host's memory by hand, as a faulty one does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from hoplite_mp import _engine
from tests.support.engine_hosts import REQUEST, EngineHost, Frame, Peer, join

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 32 * 1024
BLOCKS = 8
KEY = (1, 0, 0, 0)


@pytest.fixture
def hosts() -> Iterator[list[EngineHost]]:
    made = [EngineHost(number, block_bytes_max=BLOCK) for number in (5, 6, 7)]
    yield made
    for host in made:
        host.engine.stop()


def blocks(host: EngineHost, begin: int = 0) -> list[Frame]:
    """What a peer receives that asks for the cell from there on."""
    peer = Peer(host)
    nbytes = BLOCKS * BLOCK
    peer.send(Frame(REQUEST, KEY, 1 << 16, begin, nbytes, length=0, block_crc=0))
    found = []
    while not found or found[-1].offset + len(found[-1].block) < nbytes:
        found.append(peer.receive())
    peer.close()
    return found


def fits(frame: Frame) -> bool:
    return frame.block_crc == _engine.crc32c(frame.block)


def values() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(1).integers(0, 256, BLOCKS * BLOCK, np.uint8)


def test_a_relay_passes_on_the_checksum_that_it_has_verified(hosts: list[EngineHost]) -> None:
    source, relay, last = hosts
    given, copy, got = values(), np.zeros_like(values()), np.zeros_like(values())
    source.engine.cell(KEY, given, filled=True)
    link, _ = join(relay, source)
    cell = relay.engine.cell(KEY, copy)
    relay.engine.pull(cell, link, KEY)
    relay.filled(cell)
    assert all(map(fits, blocks(relay)))
    copy[2 * BLOCK + 17] ^= 1  # in the relay's memory, after it was verified
    link, _ = join(last, relay)
    late = last.engine.cell(None, got)
    last.engine.pull(late, link, KEY)
    *_, reason = last.wait_for(_engine.PULL_FAILED, late)
    assert "does not match its checksum" in reason
    assert last.engine.watermark(late) == 2 * BLOCK
    assert np.array_equal(got[: 2 * BLOCK], given[: 2 * BLOCK])


def test_the_checksum_of_a_fold_is_that_of_its_bytes_when_they_were_first_sent(
    hosts: list[EngineHost],
) -> None:
    host = hosts[0]
    parts = [np.full(BLOCKS * BLOCK // 4, i, np.float32) for i in (1, 2)]
    sources = [host.engine.cell(None, part.view(np.uint8), filled=True) for part in parts]
    total = np.zeros_like(parts[0])
    result = host.engine.cell(KEY, total.view(np.uint8))
    host.engine.fold(result, sources, "sum", "float32")
    host.filled(result)
    assert [fits(block) for block in blocks(host)] == [True] * BLOCKS
    total[BLOCK // 4] = 4  # the first element of the second block
    assert [fits(block) for block in blocks(host)] == [True, False] + [True] * (BLOCKS - 2)
    # Whoever goes on in the middle of a block gets the rest of it with a checksum of its own.
    assert [fits(block) for block in blocks(host, BLOCK + 8)] == [True] * (BLOCKS - 1)


def test_an_array_that_its_owner_gives_may_change(hosts: list[EngineHost]) -> None:
    host, given = hosts[0], values()
    host.engine.cell(KEY, given, filled=True)
    for _ in range(2):
        found = blocks(host)
        assert all(map(fits, found))
        assert b"".join(block.block for block in found) == given.tobytes()
        given[BLOCK] ^= 1


def test_links_without_checksums_keep_none(hosts: list[EngineHost]) -> None:
    source, relay, _ = hosts
    given, copy = values(), np.zeros_like(values())
    source.engine.cell(KEY, given, filled=True)
    link, _ = join(relay, source, checksum=False)
    cell = relay.engine.cell(KEY, copy)
    relay.engine.pull(cell, link, KEY)
    relay.filled(cell)
    copy[5] ^= 1
    assert all(map(fits, blocks(relay)))
