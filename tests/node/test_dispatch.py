"""The table of handlers of each kind of sender is complete, or the node is not built."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._node.dispatch import complete
from hoplite_mp._node.runtime.tables import ignored_alone
from hoplite_mp._protocol.messages import Leave, MembersChanged, NodeAdmitted


def taken(_: Any) -> None:
    raise AssertionError("no message was sent")


def test_table_with_one_handler_for_each_message_is_complete() -> None:
    table = complete(NodeAdmitted | Leave, {Leave: taken}, {NodeAdmitted: taken})
    assert table == {Leave: taken, NodeAdmitted: taken}


def test_table_without_a_handler_is_refused_with_the_message() -> None:
    with pytest.raises(TypeError, match=r"or handlers without one: MembersChanged$"):
        complete(MembersChanged | Leave, {Leave: taken})


def test_table_with_a_handler_of_another_sender_is_refused() -> None:
    with pytest.raises(TypeError, match=r"without one: Leave$"):
        complete(
            MembersChanged | NodeAdmitted,
            {Leave: taken},
            dict.fromkeys((MembersChanged, NodeAdmitted), taken),
        )


def test_table_with_two_handlers_for_a_message_is_refused() -> None:
    with pytest.raises(TypeError, match="two handlers for Leave"):
        complete(Leave | MembersChanged, {Leave: taken}, {Leave: taken, MembersChanged: taken})


def test_node_without_other_hosts_ignores_messages_about_hosts() -> None:
    assert ignored_alone()[Leave](Leave(0, 0)) is None
