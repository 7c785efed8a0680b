"""Whether this node has joined a cluster, and whether it is about to end.

Why it exists: several rooms may find out that the cluster has ended, or that this host is cut off
from it. They set a flag here, and the node's loop stops after the current turn.
It must never know: what the rooms do until then.
"""

from __future__ import annotations

__all__ = ["Life"]


class Life:
    """The state of one node. `alone`: a cluster of one host, whose node need not wait for the
    manager to give it a number."""

    def __init__(self, alone: bool) -> None:
        self.standing = alone  # this node has joined, and knows its number
        self.stopping = False  # the current turn of the loop is the last one
        self.orderly = False  # all workers had ended before the node stopped
        self.given_up = False  # this host is alive but was excluded, or is cut off from the others

    def leave(self) -> None:
        """Stops the node, because it is not needed any more or the cluster has ended. The
        supervisor then ends the host's other processes."""
        self.stopping = True

    def workers_ended(self) -> None:
        """Stops the node after the supervisor has ended all workers: an orderly shutdown."""
        self.stopping = self.orderly = True
