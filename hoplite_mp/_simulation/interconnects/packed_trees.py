"""The largest number of spanning trees from host 0 that share no directed link.

Edmonds (1973): this number is the smallest maximum flow from the root to any host. Lovász (1976): a
tree can take any link that leaves it, as long as the remaining links have enough flow to the link's
receiver for the remaining trees. Switches cannot duplicate messages, so they are removed first: a
link into a switch and a link out of it become one link, if the flows to all hosts stay large
enough. Bang-Jensen, Frank and Jackson (1995) prove that such pairs exist where each switch has as
many links in as out.

_planner/packing.py packs trees for measured rates of hosts and pairs, approximately. Here all links
are equal, the hosts are not a star, and the result is exact.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp._simulation.interconnects.interconnect import Interconnect, Link, Path

__all__ = ["maximum_flow", "packed_trees"]

ROOT = 0


def packed_trees(network: Interconnect) -> list[list[tuple[int, Path]]]:
    """The (step, path) of the messages of each tree, the first links of a tree first."""
    links = list(network.links)
    count = min(maximum_flow(Counter(links), host, len(links)) for host in range(1, network.hosts))
    paths = _without_switches(network, links, count)
    remaining = Counter({link: len(found) for link, found in paths.items()})
    trees: list[list[tuple[int, Path]]] = []
    for left in reversed(range(count)):
        depths = {ROOT: 0}
        tree: list[tuple[int, Path]] = []
        while len(depths) < network.hosts:
            link = _next_link(depths, remaining, left)
            sender, receiver = link
            remaining[link] -= 1
            tree.append((depths[sender], paths[link].pop()))
            depths[receiver] = depths[sender] + 1
        trees.append(tree)
    return trees


def _next_link(depths: dict[int, int], remaining: Counter[Link], left: int) -> Link:
    """A link that the tree can take, from a host as near to the root as possible."""
    for sender in sorted(depths, key=depths.__getitem__):
        for link, number in remaining.items():
            if link[0] != sender or not number or link[1] in depths:
                continue
            remaining[link] -= 1
            enough = maximum_flow(remaining, link[1], left) >= left
            remaining[link] += 1
            if enough:
                return link
    raise AssertionError("Lovász: there is always such a link")


def _without_switches(
    network: Interconnect, links: list[Link], count: int
) -> dict[Link, list[Path]]:
    """Links between hosts, with their paths. The flow to each host is at least `count`."""
    paths: dict[Link, list[Path]] = {link: [link] for link in links}
    remaining = Counter(links)
    vertices = {vertex for link in links for vertex in link}
    for switch in sorted(vertices - set(range(network.hosts))):
        for sender in sorted(vertices):
            while remaining[sender, switch]:
                receiver = _partner(network.hosts, remaining, sender, switch, count)
                first, second = paths[sender, switch].pop(), paths[switch, receiver].pop()
                if sender != receiver:
                    paths.setdefault((sender, receiver), []).append(first + second[1:])
        vertices.remove(switch)
    return {link: found for link, found in paths.items() if found}


def _partner(hosts: int, remaining: Counter[Link], sender: int, switch: int, count: int) -> int:
    """The receiver of the switch's link that is joined with the sender's link. Changes `remaining`
    accordingly."""
    receivers = [link[1] for link, number in remaining.items() if link[0] == switch and number]
    for receiver in sorted(receivers, key=lambda one: (one - sender - 1) % (2 * hosts)):
        _join(remaining, sender, switch, receiver, 1)
        if _reaches_all(remaining, hosts, count):
            return receiver
        _join(remaining, sender, switch, receiver, -1)
    raise AssertionError("Bang-Jensen, Frank and Jackson: there is always such a pair")


def _join(remaining: Counter[Link], sender: int, switch: int, receiver: int, number: int) -> None:
    remaining[sender, switch] -= number
    remaining[switch, receiver] -= number
    if sender != receiver:
        remaining[sender, receiver] += number


def _reaches_all(links: Counter[Link], hosts: int, count: int) -> bool:
    """Whether the flow to each host is at least `count`."""
    if count > 1:
        return all(maximum_flow(links, host, count) >= count for host in range(1, hosts))
    capacity = _capacities(links)
    return len(_search(capacity, None).keys() & set(range(hosts))) == hosts


def maximum_flow(links: Counter[Link], host: int, enough: int) -> int:
    """The maximum flow from the root to a host, or `enough` if it is larger."""
    capacity = _capacities(links)
    for flow in range(enough):
        before = _search(capacity, host)
        if host not in before:
            return flow
        vertex = host
        while vertex != ROOT:
            capacity[before[vertex]][vertex] -= 1
            capacity[vertex][before[vertex]] += 1
            vertex = before[vertex]
    return enough


def _capacities(links: Counter[Link]) -> dict[int, dict[int, int]]:
    """The number of links from each vertex to each other vertex, with 0 for the way back."""
    capacity: dict[int, dict[int, int]] = {}
    for (sender, receiver), number in links.items():
        if number:
            ahead = capacity.setdefault(sender, {})
            ahead[receiver] = ahead.get(receiver, 0) + number
            capacity.setdefault(receiver, {}).setdefault(sender, 0)
    return capacity


def _search(capacity: dict[int, dict[int, int]], host: int | None) -> dict[int, int]:
    """For each vertex that can be reached from the root, the vertex before it. Stops at `host`."""
    before = {ROOT: ROOT}
    queue = [ROOT]
    for vertex in queue:
        if vertex == host:
            break
        for other, number in capacity.get(vertex, {}).items():
            if number and other not in before:
                before[other] = vertex
                queue.append(other)
    return before
