"""Spilled objects that several processes read, with room for one of them at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hoplite_mp.errors import StoreFullError
from hoplite_mp.headers import KIND_OPERATION, NODE_SLOT, STATE
from hoplite_mp.node.objects.store import HANDED_S
from tests.cext.host import Host
from tests.node.losses import LossNetwork
from tests.node.test_imports import away_hold

if TYPE_CHECKING:
    from collections.abc import Iterator

MIB = 1 << 20
BIG = np.arange(MIB // 8, dtype=np.float64)


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host()
    host.store.limit = MIB + MIB // 2
    yield host
    host.close()


def put(host: Host) -> tuple[int, Any]:
    """An object of 1 MiB, and a hold on it."""
    block = host.store.lease(MIB, NODE_SLOT)
    assert block is not None
    oid = host.node.new(KIND_OPERATION, STATE["CLAIMED"], NODE_SLOT, 0)
    hold = host.node.hold(oid, False)
    host.results.store_block(oid, block, MIB)
    return oid, hold


def test_what_was_brought_back_for_a_reader_stays_until_it_has_seen_it(host: Host) -> None:
    """Else two readers take the room from each other for ever."""
    (one, _first), (other, _second) = put(host), put(host)
    assert host.node.state(one) == STATE["SPILLED"]
    reader, late = host.client().slot, host.client().slot
    assert host.store.restore(one, reader)
    assert host.node.state(other) == STATE["SPILLED"]
    assert host.store.restore(other, late) is None
    assert host.node.state(one) == STATE["SEALED"]
    host.loop.time += HANDED_S  # its reader has died
    assert host.store.restore(other, late)
    assert host.node.state(one) == STATE["SPILLED"]


def test_what_the_node_brings_back_for_itself_is_nobodys(host: Host) -> None:
    (one, _first), (other, _second) = put(host), put(host)
    assert host.store.restore(one)
    assert host.store.restore(other)
    assert host.node.state(one) == STATE["SPILLED"]


@pytest.mark.parametrize("frees", [True, False])
def test_another_host_reads_what_is_spilled_when_there_is_room_for_it(frees: bool) -> None:
    """The owner has it on its disk, and all of its memory is pinned: the object is not lost. The
    reader gets it as soon as there is room, or learns that there was none for put_wait_s."""
    network = LossNetwork(2)
    home, away = network.sides
    object_id, _mine = home.put(BIG)
    home.store.limit = home.store.arena.used + MIB // 2
    (hold,) = away_hold(network, away, object_id)
    _, pinned = home.put(BIG + 1)
    assert home.node.state(home.imports.own(object_id)) == STATE["SPILLED"]
    view: Any = home.node.view(pinned.oid)
    heard: list[int] = []
    assert away.remote_objects.want(hold.oid, lambda: heard.append(1))  # type: ignore[attr-defined]
    network.settle()
    assert not heard
    if frees:
        del view
    else:
        home.loop.time += home.results.config.put_wait_s
    network.settle()
    value = away.value(hold)
    if frees:
        assert (value == BIG).all()
    else:
        assert isinstance(value, StoreFullError)
        assert object_id.hex() in str(value)
    del hold, value
    network.close()
