"""Whether there is a node at the other end of a process's line to it."""

from __future__ import annotations

from typing import Any

import pytest

from hoplite_mp._client.channel import Channel, seqpacket_pair
from hoplite_mp.integrations._joblib_pools import _takes_part


@pytest.mark.parametrize("who", ["the node", "this process"])
def test_it_is_open_until_one_end_closes(who: str) -> None:
    """The end of a node that was killed is seen at once, before anything was sent."""
    here, there = seqpacket_pair()
    channel = Channel(here)
    assert channel.is_open
    there.send(b"a reply that nobody has read")
    assert channel.is_open
    if who == "the node":
        there.close()
    else:
        channel.close()
    assert not channel.is_open
    channel.close()
    there.close()


class JoinedRuntime:
    """The runtime of a process that takes part, with its client and memory."""

    lost, usable = None, True

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.client = self.memory = self


def test_a_pool_whose_node_was_killed_a_moment_ago_is_not_used_again() -> None:
    """joblib's next call starts other workers, also if nobody has noticed the death yet."""
    here, there = seqpacket_pair()
    runtime: Any = JoinedRuntime(Channel(here))
    assert _takes_part(runtime)
    there.close()
    assert not _takes_part(runtime)
    runtime.channel.close()
