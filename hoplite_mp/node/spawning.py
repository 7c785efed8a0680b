"""A worker of this host is asked for.

Why it exists: the supervisor forks it; its line to the node and its pipes are made here and handed
over.
It must never know: which pools need workers, what a worker does.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import msgspec

from hoplite_mp.client.channel import seqpacket_pair
from hoplite_mp.protocol.spawning import Spawn

if TYPE_CHECKING:
    from hoplite_mp.node.main import Node
    from hoplite_mp.node.pools import Pool

__all__ = ["spawn"]


def spawn(node: Node, slot: int, pool: Pool, assigned: dict[str, list[int]]) -> bool:
    """A worker of that pool, for that slot, with these indices of resources. False: its line and
    its pipes cannot be made now."""
    made: list[int] = []
    try:
        mine, theirs = seqpacket_pair()
        for _ in range(2):
            made += os.pipe2(os.O_CLOEXEC)
    except OSError as error:  # no descriptor is left: fewer workers, then
        for fd in made:
            os.close(fd)
        node.workers.not_started(error.strerror or str(error))
        return False
    out, err = made[:2], made[2:]
    node.connect(slot, mine, out[0], err[0], pool.audience)
    ask = Spawn(slot, pool.number, pool.max_tasks, pool.setup, pool.audience, pool.env, assigned)
    try:
        fds = [theirs.fileno(), out[1], err[1], *pool.descriptors]
        socket.send_fds(node.supervisor, [msgspec.msgpack.encode(ask)], fds)
    except OSError:
        node.leave()
    theirs.close()
    os.close(out[1])
    os.close(err[1])
    return True
