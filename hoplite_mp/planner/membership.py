"""Which nodes are there, in which life, and which of their clients are known to be gone.

Messages may be late. The rule that makes late ones harmless is one and the same for both: lives
are numbered upwards (a node's incarnation, a client slot's generation), and what belongs to a life
that is over is ignored.

What is kept is bounded by the hosts and client slots of the cluster: two numbers per node, one
number per slot that ever lost a process.

This module must never know what nodes and clients are used for.
"""

from __future__ import annotations


class Membership:
    """The living nodes, and the dead as far as their late messages could deceive."""

    def __init__(self) -> None:
        self._living: dict[int, int] = {}  # node -> incarnation
        self._ended: dict[int, int] = {}  # node -> highest incarnation that is over
        self._gone: dict[int, dict[int, int]] = {}  # node -> client -> highest generation gone

    @property
    def nodes(self) -> tuple[int, ...]:
        """The living nodes in order of joining."""
        return tuple(self._living)

    def is_joining(self, node: int, incarnation: int) -> bool:
        """Would this be the beginning of a new life? (Not a double, not a late message.)"""
        known = max(self._living.get(node, -1), self._ended.get(node, -1))
        return incarnation > known

    def is_living(self, node: int, incarnation: int | None = None) -> bool:
        """Is the node there, in that life if one is named?"""
        living = self._living.get(node)
        return living is not None and incarnation in (None, living)

    def join(self, node: int, incarnation: int) -> None:
        """A new life begins; the one before, if any, was ended by `lose`."""
        assert self.is_joining(node, incarnation)
        assert node not in self._living
        self._living[node] = incarnation

    def lose(self, node: int) -> None:
        """The node's present life is over; its clients went with it."""
        self._ended[node] = self._living.pop(node)
        self._gone.pop(node, None)

    def is_client_gone(self, node: int, client: int, generation: int) -> bool:
        """Has this use of the slot, or a later one, ended?"""
        return generation <= self._gone.get(node, {}).get(client, -1)

    def lose_client(self, node: int, client: int, generation: int) -> None:
        """This use of the slot is over, and so are all before it."""
        gone = self._gone.setdefault(node, {})
        gone[client] = max(generation, gone.get(client, -1))
