"""MultiTree (Huang et al., ISCA 2021): a tree from each host, grown together in time steps.

Each directed link carries at most one message in a step. The trees take turns. In its turn, a tree
adds one host that it can reach over free links from a host that joined it in an earlier step; the
hosts that joined first are tried first. When no tree can add a host, the next step begins, with the
turn of another tree. A message passes through any number of switches in one step, but not through
hosts.
"""

from __future__ import annotations

import functools
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._simulation.interconnects.interconnect import Interconnect, Link, Path

__all__ = ["multitree"]


def multitree(network: Interconnect) -> list[list[tuple[int, Path]]]:
    """The (step, path) of the messages of each host's tree."""
    hosts, neighbours = network.hosts, network.neighbours()

    @functools.cache
    def receivers(sender: int, here: int) -> list[int]:
        """The neighbours of a vertex on a path from a sender. They are ordered by their distance
        from the sender in the numbering, so that the senders of a star choose different
        receivers."""
        return sorted(neighbours[here], key=lambda one: (one - sender) % hosts)

    trees = [_GrowingTree(root, hosts, receivers) for root in range(hosts)]
    step = 0
    while any(tree.missing for tree in trees):
        free = set(network.links)
        for tree in trees:
            tree.begin_step()
        first = step % hosts
        growing = trees[first:] + trees[:first]
        while growing:
            growing = [tree for tree in growing if tree.add_host(step, free)]
        step += 1
    return [tree.sends for tree in trees]


class _GrowingTree:
    """One tree while it grows."""

    def __init__(self, root: int, hosts: int, receivers: Callable[[int, int], list[int]]) -> None:
        self.sends: list[tuple[int, Path]] = []
        self.missing = set(range(hosts)) - {root}
        self._hosts = hosts
        self._receivers = receivers
        self._joined = [root]
        self._senders: list[int] = []  # the hosts that can still add a host in this step

    def begin_step(self) -> None:
        self._senders = list(self._joined)

    def add_host(self, step: int, free: set[Link]) -> bool:
        """Adds one host, and removes the links to it from `free`. Returns False if this is
        impossible in this step."""
        while self.missing and self._senders:
            path = self._path_from(self._senders[0], free)
            if path is None:  # no link becomes free during a step
                del self._senders[0]
                continue
            free.difference_update(pairwise(path))
            self.missing.remove(path[-1])
            self._joined.append(path[-1])
            self.sends.append((step, path))
            return True
        return False

    def _path_from(self, sender: int, free: set[Link]) -> Path | None:
        """The shortest path over free links to a missing host."""
        paths: list[Path] = [(sender,)]
        seen = {sender}
        for path in paths:
            here = path[-1]
            for receiver in self._receivers(sender, here):
                if receiver in seen or (here, receiver) not in free:
                    continue
                if receiver in self.missing:
                    return (*path, receiver)
                if receiver >= self._hosts:
                    seen.add(receiver)
                    paths.append((*path, receiver))
        return None
