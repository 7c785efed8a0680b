"""A turn of the node looks at objects of other hosts that have changed, not at all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hoplite_mp._common import ids
from tests.support.node_hosts import Network
from tests.support.shm_host import STATE

if TYPE_CHECKING:
    from collections.abc import Iterator

OBJECTS = 2000
KIND_TASK, NODE_SLOT = 2, 0


class Counted:
    """A client whose looks at single headers are counted."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.looks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def state(self, oid: int) -> int:
        self.looks += 1
        return int(self.client.state(oid))


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network(2)
    yield made
    made.close()


def test_only_freed_or_deleted_objects_are_visited(network: Network) -> None:
    """Results of a process here that are on another host: its headers, which the node never
    collects."""
    side = network.nodes[0]
    party, remote_objects = side.party, side.remote_objects
    released: list[int] = []
    oids = [party.new(KIND_TASK, STATE["CLAIMED"], NODE_SLOT, 0) for _ in range(OBJECTS)]
    for oid in oids:
        assert side.node.finish_elsewhere(oid, 1000, False)
        remote_objects.add(oid, ids.pack_id(side.host_id, oid), 1000, (1,), b"")
        remote_objects.by_oid[oid].released = lambda oid=oid: released.append(oid)
    counted = Counted(remote_objects.client)
    remote_objects.client = counted  # type: ignore[assignment]
    assert remote_objects.purge() == []
    assert counted.looks == 0
    party.release(oids[7])
    assert party.delete(oids[9]) == 1
    assert len(remote_objects.purge()) == 2
    assert sorted(released) == sorted([oids[7], oids[9]])
    assert counted.looks <= 4
    again = party.collect() or [party.new(KIND_TASK, STATE["CLAIMED"], NODE_SLOT, 0)]
    assert again
    assert remote_objects.purge() == []
    assert len(remote_objects.by_oid) == OBJECTS - 2
    # Freed, collected and used again before the node looks.
    party.release(oids[11])
    party.collect()
    other = party.new(KIND_TASK, STATE["CLAIMED"], NODE_SLOT, 0)
    assert other >> 32 == oids[11] >> 32
    assert len(remote_objects.purge()) == 1
    assert released[-1] == oids[11]
