"""What is sent one after the other goes in an order that is the same in every process."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from hoplite_mp._client.actors import ActorInfo
from hoplite_mp._common import ids
from hoplite_mp._protocol.membership import ReportedCopy
from hoplite_mp._protocol.peers import Reconstruct
from tests.support.node_harness import member

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from tests.support.node_harness import NodeHarness

OTHER = member(1).host_id


def test_copies_are_reported_in_arrival_order(
    make_node: Callable[..., NodeHarness],
) -> None:
    node = make_node([member(1)])
    objects = [ids.pack_id(OTHER, number << 33) for number in range(40, 0, -1)]
    for object_id in objects:
        payload = node.store.lease(8, 0)
        assert payload is not None
        node.cluster.replicas.seal(object_id, payload, 8)
        node.cluster.transfers._has_copy(object_id)
    told = [one for one in node.node_events.report() if isinstance(one, ReportedCopy)]
    assert [one.object for one in told] == objects


def test_requests_for_a_reconstructed_object_are_answered_in_order(
    make_node: Callable[..., NodeHarness], monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node([member(1)])
    hold = node.process().put("value")
    making, numbers = {hold.oid}, list(range(40, 0, -1))
    monkeypatch.setattr(node.parts.remote_objects, "needs_making", making.__contains__)
    for number in numbers:
        node.receive(OTHER, Reconstruct(ids.pack_id(node.host_id, hold.oid), number))
    assert not node.taken()
    making.clear()
    node.poll()
    assert [answer.number for _, answer in node.taken()] == numbers


def test_equal_actor_handles_have_equal_pickles() -> None:
    names = [f"method_{at}" for at in range(40)]
    one, other = (
        ActorInfo("Model", "", frozenset(order), 0, None, False, 0, (), 0, frozenset(order[:2]))
        for order in (names, [*names[:2][::-1], *names[:1:-1]])
    )
    assert pickle.dumps(one.plain) == pickle.dumps(other.plain)
    assert one.plain[2] == tuple(sorted(names))
    assert ActorInfo.of(pickle.loads(pickle.dumps(one.plain))) == one
