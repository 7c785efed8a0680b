"""Whether there is a node at the other end of a process's line to it."""

from __future__ import annotations

import pytest

from hoplite_mp.client.channel import Channel, seqpacket_pair


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
