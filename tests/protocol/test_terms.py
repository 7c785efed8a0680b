"""Words about terms: as bytes and back, and nothing illegal."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._protocol import terms as t
from hoplite_mp._protocol.codec import encode, manager_decoder, node_decoder, promotion_decoder
from hoplite_mp._protocol.fields import NODES_MAX
from hoplite_mp.errors import ProtocolError
from tests.support.messages import KNOWLEDGE, LISTS, TERMS_TO_MANAGER, TERMS_TO_NODE


@pytest.mark.parametrize("message", TERMS_TO_NODE, ids=lambda one: type(one).__name__)
def test_terms_messages_to_nodes_are_refused_by_managers(message: Any) -> None:
    if isinstance(message, t.PromoteResponse):  # for the command alone
        with pytest.raises(ProtocolError):
            node_decoder().feed(encode(message))
    else:
        assert node_decoder().feed(encode(message)) == [message]
    assert promotion_decoder().feed(encode(message)) == [message]
    with pytest.raises(ProtocolError):
        manager_decoder().feed(encode(message))


@pytest.mark.parametrize("message", TERMS_TO_MANAGER, ids=lambda one: type(one).__name__)
def test_terms_messages_to_managers_are_refused_by_nodes(message: Any) -> None:
    assert manager_decoder().feed(encode(message)) == [message]
    with pytest.raises(ProtocolError):
        node_decoder().feed(encode(message))


def test_knowledge_decoded_has_majorities() -> None:
    (knows,) = manager_decoder().feed(encode(t.VoterState(2, KNOWLEDGE)))
    assert knows.knowledge.latest == LISTS[1]
    assert knows.knowledge.latest.has_majority({0, 2})
    assert not LISTS[0].has_majority({0})
    assert LISTS[1].has_half({2, 5})


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (t.StandbyAnnounced, ((),)),
        (t.StandbyAnnounced, (("",),)),
        (t.LeaderHeartbeat, (-1, 0, 0)),
        (t.LeaderHeartbeat, (1, NODES_MAX, 0)),
        (t.LeaderHeartbeat, (1, 0, 0, (t.Hosts(1, (NODES_MAX,)),))),
        (t.LeaderHeartbeat, (1, 0, 0, (t.Hosts(-1, (0,)),))),
        (t.LeaderHeartbeat, (1, 0, 0, (t.Hosts(1, ()),) * (t.LISTS_MAX + 1))),
        (t.VoteRequest, (2, -1)),
        (t.LeaderHeartbeatAck, (0, 1, -1, 0)),
        (t.VoterState, (0, t.Knowledge(-1, None, ()))),
        (t.VoteGranted, (0, 2, t.Knowledge(1, NODES_MAX, ()))),
        (t.NoLeader, (-1,)),
        (t.Superseded, (-1,)),
        (t.Promote, (1,)),
        (t.PromoteResponse, (True, "")),
    ],
)
def test_terms_messages_with_illegal_fields_raise(kind: type, values: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="must be"):
        kind(*values)
