"""What is sent one after the other goes in an order that is the same in every process."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

from hoplite_mp._client.actors import ActorInfo
from hoplite_mp._node.execution.transfers import Transfers
from hoplite_mp._node.objects.exports import Exports
from hoplite_mp._protocol.peers import Reconstruct

OBJECTS = [bytes([255 - at]) * 16 for at in range(40)]


def test_copies_are_reported_in_the_order_in_which_they_came() -> None:
    room: Any = SimpleNamespace(
        client=SimpleNamespace(
            number=1, host_id=1000, inspect=lambda oid: {"size": 8}
        ),
        imports=SimpleNamespace(local=lambda object_id: 7),
        remote_objects={},
        copies={},
        _executions=[],
        _not_planned=lambda: (),
    )  # fmt: skip
    for one in OBJECTS:
        Transfers._has_copy(room, one)
    assert [told.object for told in Transfers.report(room)] == OBJECTS


def test_who_has_asked_for_what_is_made_again_is_answered_in_order() -> None:
    making = {7}
    answered: list[bytes] = []
    room: Any = SimpleNamespace(
        again={},
        exports={},
        own=lambda object_id: 7,
        remote_objects=SimpleNamespace(needs_making=making.__contains__),
        tasks=SimpleNamespace(take_parked_news=tuple, done=lambda oid: True),
        _watched={},
        send=lambda peer, message: answered.append(message),
        describe=lambda oid, object_id, number: object_id,
    )
    for one in OBJECTS:
        Exports.make_again(room, 1001, Reconstruct(one, 5))
    making.clear()
    Exports.poll(room)
    assert answered == OBJECTS


def test_equal_handles_of_actors_are_pickled_alike() -> None:
    names = [f"method_{at}" for at in range(40)]
    one, other = (
        ActorInfo("Model", "", frozenset(order), 0, None, False, 0, (), 0, frozenset(order[:2]))
        for order in (names, [*names[:2][::-1], *names[:1:-1]])
    )
    assert pickle.dumps(one.plain) == pickle.dumps(other.plain)
    assert one.plain[2] == tuple(sorted(names))
    assert ActorInfo.of(pickle.loads(pickle.dumps(one.plain))) == one
