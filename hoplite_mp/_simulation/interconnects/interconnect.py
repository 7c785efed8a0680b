"""Interconnects of hosts for `hoplite-mp simulate --topology`: links, routes, and a ring of hosts.

All links have one rate per direction. Hosts have the numbers 0 to hosts - 1, switches the numbers
after them. Hosts of a torus or mesh have routers, so a route can pass through other hosts.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    Link = tuple[int, int]  # (sender, receiver), hosts or switches
    Path = tuple[int, ...]  # hosts and switches from a sender to a receiver

__all__ = ["HOSTS_MAX", "Interconnect", "interconnect"]

# MultiTree has as many messages as there are pairs of hosts. The slowest search, on a fat tree of
# 100 hosts, takes 5 s.
HOSTS_MAX = 128

_GRID = re.compile(r"(torus|mesh):(\d{1,4})x(\d{1,4})")
_SWITCHED = re.compile(r"(fattree|star):(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """Hosts, switches, and the directed links between them.

    ring: all hosts, in an order in which neighbours are close to each other. route: the path of a
    message from one host to another; it is a shortest path.
    """

    name: str
    hosts: int
    links: tuple[Link, ...]
    ring: Path
    route: Callable[[int, int], Path]

    def neighbours(self) -> dict[int, list[int]]:
        """For each host and switch, the receivers of its links."""
        found: dict[int, list[int]] = {}
        for sender, receiver in self.links:
            found.setdefault(sender, []).append(receiver)
        return found


def interconnect(text: str) -> Interconnect:
    """The interconnect with this name: torus:8x8, mesh:8x8, fattree:16 (a square number of hosts)
    or star:16. Raises ValueError for any other text."""
    if grid := _GRID.fullmatch(text):
        kind, rows, columns = grid[1], int(grid[2]), int(grid[3])
        _check_hosts(text, rows * columns)
        return _grid(text, rows, columns, wraps=kind == "torus")
    if switched := _SWITCHED.fullmatch(text):
        hosts = int(switched[2])
        _check_hosts(text, hosts)
        return _star(text, hosts) if switched[1] == "star" else _fat_tree(text, hosts)
    raise ValueError(f"{text!r} is none of torus:8x8, mesh:8x8, fattree:16, star:16, in any size")


def _check_hosts(text: str, hosts: int) -> None:
    if not 2 <= hosts <= HOSTS_MAX:
        raise ValueError(f"{text!r} has {hosts} hosts: 2 to {HOSTS_MAX} are possible")


def _both_ways(pairs: set[Link]) -> tuple[Link, ...]:
    return tuple(sorted(pairs | {(receiver, sender) for sender, receiver in pairs}))


# ---- grids


def _grid(name: str, rows: int, columns: int, wraps: bool) -> Interconnect:
    """Routes go along the row first, then along the column."""
    pairs: set[Link] = set()
    for row in range(rows):
        for column in range(columns):
            here = row * columns + column
            if column + 1 < columns or (wraps and columns > 2):
                pairs.add((here, row * columns + (column + 1) % columns))
            if row + 1 < rows or (wraps and rows > 2):
                pairs.add((here, (row + 1) % rows * columns + column))

    def route(sender: int, receiver: int) -> Path:
        row, column = divmod(sender, columns)
        last_row, last_column = divmod(receiver, columns)
        path = [row * columns + each for each in _line(column, last_column, columns, wraps)]
        path += [each * columns + last_column for each in _line(row, last_row, rows, wraps)[1:]]
        return tuple(path)

    return Interconnect(name, rows * columns, _both_ways(pairs), _circuit(rows, columns), route)


def _line(begin: int, end: int, length: int, wraps: bool) -> list[int]:
    """The places from `begin` to `end`, the shorter way around. If both ways are equally long, even
    places use one way and odd places the other, so that both ways are used."""
    ahead = (end - begin) % length if wraps else end - begin
    if wraps and (2 * ahead > length or (2 * ahead == length and begin % 2)):
        ahead -= length
    direction = 1 if ahead > 0 else -1
    return [(begin + direction * step) % length for step in range(abs(ahead) + 1)]


def _circuit(rows: int, columns: int) -> Path:
    """A Hamiltonian cycle of the grid, if the number of rows or columns is even. Otherwise the
    last and the first host are not neighbours."""
    if rows == 1 or columns == 1:
        return tuple(range(rows * columns))
    if rows % 2 and columns % 2 == 0:
        turned = _circuit(columns, rows)
        return tuple(place % rows * columns + place // rows for place in turned)
    if rows % 2:
        lines = [range(columns) if row % 2 == 0 else range(columns)[::-1] for row in range(rows)]
        return tuple(row * columns + column for row in range(rows) for column in lines[row])
    # Column 0 leads back to the first row.
    circuit = [0]
    for row in range(rows):
        line = range(1, columns) if row % 2 == 0 else range(columns - 1, 0, -1)
        circuit += [row * columns + column for column in line]
    return (*circuit, *(row * columns for row in range(rows - 1, 0, -1)))


# ---- switches


def _star(name: str, hosts: int) -> Interconnect:
    links = _both_ways({(host, hosts) for host in range(hosts)})
    ring = tuple(range(hosts))
    return Interconnect(name, hosts, links, ring, lambda one, other: (one, hosts, other))


def _fat_tree(name: str, hosts: int) -> Interconnect:
    """Two levels with full bisection: each leaf switch has as many hosts as links to spine
    switches. The spine switch of a route depends on the receiver."""
    width = math.isqrt(hosts)
    if width * width != hosts:
        raise ValueError(f"{name!r}: the number of hosts of a fat tree is a square number")
    leaf = [hosts + host // width for host in range(hosts)]
    spine = [hosts + width + number for number in range(width)]
    pairs = {(host, leaf[host]) for host in range(hosts)}
    pairs |= {(hosts + number, above) for number in range(width) for above in spine}

    def route(sender: int, receiver: int) -> Path:
        if leaf[sender] == leaf[receiver]:
            return (sender, leaf[sender], receiver)
        return (sender, leaf[sender], spine[receiver % width], leaf[receiver], receiver)

    return Interconnect(name, hosts, _both_ways(pairs), tuple(range(hosts)), route)
