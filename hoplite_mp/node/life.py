"""Whether this node is in a cluster, and whether it ends.

Why it exists: several rooms may find that there is no cluster any more, or that this host is cut
off from it, and the loop ends with that turn.
It must never know: what the rooms do until then.
"""

from __future__ import annotations

__all__ = ["Life"]


class Life:
    """Of one node. `alone`: there are no other hosts, and no number to wait for."""

    def __init__(self, alone: bool) -> None:
        self.standing = alone  # the number of this node is known
        self.stopping = False  # this is the last turn
        self.orderly = False  # all workers have ended before
        self.given_up = False  # this host lives, and the others have lost it, or it them

    def leave(self) -> None:
        """Nobody needs this node any more, or there is no cluster: the supervisor ends the rest of
        the host."""
        self.stopping = True

    def workers_ended(self) -> None:
        """The supervisor has ended all workers: the host ends in order."""
        self.stopping = self.orderly = True
