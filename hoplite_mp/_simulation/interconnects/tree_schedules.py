"""Allreduces as trees whose messages have time steps, and the time of an allreduce on an
interconnect, for `hoplite-mp simulate --topology`.

Every tree carries an equal part of the data, in blocks. Run forward, the steps distribute each
tree's part from its root to all hosts; run backward, they reduce it to the root. An allreduce runs
them backward, then forward. In each step the hosts send only data that they have received in
earlier steps. A step ends when its busiest link has carried all its messages.

Ring: Patarasuk and Yuan 2009. Halving: Thakur, Rabenseifner and Gropp 2005. Two trees: Sanders,
Speck and Träff 2009.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from hoplite_mp._simulation.interconnects.multitree import multitree
from hoplite_mp._simulation.interconnects.packed_trees import packed_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._simulation.interconnects.interconnect import Interconnect, Link, Path

__all__ = ["PLANS", "Send", "TreeSchedule", "schedule_of"]

# The largest number of blocks into which a pipelined tree divides its part, a power of two.
BLOCKS_MAX = 4096


class Send(NamedTuple):
    """One message of a tree, from the first to the last host of `path`."""

    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class TreeSchedule:
    """The messages of each tree. Block i of a tree is sent i steps later than block 0."""

    trees: tuple[tuple[Send, ...], ...]
    blocks: int = 1
    pipelined: bool = False  # any number of blocks is possible

    @property
    def steps(self) -> int:
        """The number of time steps of the allreduce, for the reduction and the distribution
        together."""
        return 2 * (self._depth() + self.blocks - 1)

    def _depth(self) -> int:
        return 1 + max(send.step for tree in self.trees for send in tree)

    def seconds(self, nbytes: float, rate: float, latency_s: float) -> float:
        """The time of an allreduce of nbytes over links of `rate` bytes a second, each way."""
        block_s = nbytes / len(self.trees) / self.blocks / rate
        return 2 * sum(latency_s + load * block_s for load in self.loads())

    def loads(self) -> list[int]:
        """Blocks that the busiest link carries in each step of the distribution."""
        depth = self._depth()
        added: list[Counter[Link]] = [Counter() for _ in range(depth)]
        for tree in self.trees:
            for send in tree:
                added[send.step].update(pairwise(send.path))
        found: list[int] = []
        loads: Counter[Link] = Counter()
        for step in range(depth + self.blocks - 1):
            if depth <= step < self.blocks:  # every level of the trees is sending
                found.append(found[-1])
                continue
            if step < depth:
                loads.update(added[step])
            if step >= self.blocks:
                loads.subtract(added[step - self.blocks])
            found.append(max(loads.values()))
        return found

    def with_best_blocks(self, nbytes: float, rate: float, latency_s: float) -> TreeSchedule:
        """The fastest number of blocks, if the trees are pipelined."""
        if not self.pipelined:
            return self
        numbers = [1 << power for power in range(BLOCKS_MAX.bit_length())]
        choices = [replace(self, blocks=number) for number in numbers]
        return min(choices, key=lambda one: one.seconds(nbytes, rate, latency_s))


def schedule_of(plan: str, network: Interconnect) -> TreeSchedule:
    """The schedule of one of PLANS. Raises ValueError if the plan is impossible here."""
    return PLANS[plan](network)


# ---- the plans


def _ring(network: Interconnect) -> TreeSchedule:
    return TreeSchedule(_chains(network, network.ring))


def _two_way_ring(network: Interconnect) -> TreeSchedule:
    """Half of the data goes around each way."""
    ring = network.ring
    return TreeSchedule((*_chains(network, ring), *_chains(network, ring[::-1])))


def _chains(network: Interconnect, ring: Path) -> tuple[tuple[Send, ...], ...]:
    """A chain around the ring from each host."""
    count = len(ring)
    hops = [network.route(ring[place], ring[(place + 1) % count]) for place in range(count)]
    return tuple(
        tuple(Send(step, hops[(begin + step) % count]) for step in range(count - 1))
        for begin in range(count)
    )


def _halving(network: Interconnect) -> TreeSchedule:
    """Recursive doubling, which is recursive halving when run backward. The largest messages are
    sent to the nearest hosts."""
    count = network.hosts
    if count & (count - 1):
        raise ValueError(f"halving needs a power of two of hosts, and {network.name} has {count}")
    rounds = count.bit_length() - 1
    trees: list[tuple[Send, ...]] = []
    for root in range(count):
        reached, sends = [root], list[Send]()
        for step in range(rounds):
            distance = count >> (step + 1)
            sends += [Send(step, network.route(host, host ^ distance)) for host in reached]
            reached += [host ^ distance for host in reached]
        trees.append(tuple(sends))
    return TreeSchedule(tuple(trees))


def _two_tree(network: Interconnect) -> TreeSchedule:
    """Two binary trees, each with half of the data; hosts that forward in one are leaves of the
    other. Neighbours on the ring are close to each other in the trees."""
    order = network.ring
    shifted = (*order[1:], order[0])
    trees = tuple(_binary_tree(network, hosts) for hosts in (order, shifted))
    return TreeSchedule(trees, pipelined=True)


def _binary_tree(network: Interconnect, hosts: Sequence[int]) -> tuple[Send, ...]:
    """The last host is the root. The others are numbered from 1. Odd numbers are leaves; the more
    zero bits a number ends with, the higher its host is in the tree."""
    count = len(hosts)
    top = 1 << ((count - 1).bit_length() - 1) if count > 1 else 0
    sends: list[Send] = []
    level = [(count, top, 0, count)]  # parent, child, and the open range of the child's subtree
    step = 0
    while level:
        below: list[tuple[int, int, int, int]] = []
        for parent, child, low, high in level:
            sends.append(Send(step, network.route(hosts[parent - 1], hosts[child - 1])))
            below += [
                (child, _middle(low, child), low, child),
                (child, _middle(child, high), child, high),
            ]
        level = [one for one in below if one[1]]
        step += 1
    return tuple(sends)


def _middle(low: int, high: int) -> int:
    """The number between them that is divisible by the largest power of two; 0 if there is none."""
    if high - low < 2:
        return 0
    power = 1
    while (high - 1) // (2 * power) * (2 * power) > low:
        power *= 2
    return (high - 1) // power * power


def _multitree(network: Interconnect) -> TreeSchedule:
    return TreeSchedule(tuple(tuple(Send(*one) for one in tree) for tree in multitree(network)))


def _packed(network: Interconnect) -> TreeSchedule:
    trees = packed_trees(network)
    return TreeSchedule(tuple(tuple(Send(*one) for one in t) for t in trees), pipelined=True)


PLANS: dict[str, Callable[[Interconnect], TreeSchedule]] = {
    "ring": _ring,
    "two-way-ring": _two_way_ring,
    "halving": _halving,
    "twotree": _two_tree,
    "multitree": _multitree,
    "packed": _packed,
}
