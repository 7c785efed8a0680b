"""One rank of the benchmarks on one emulated host: calls of a Group, timed one by one.

Every rank runs this file. Prints one line of JSON: for each row the seconds of each round, so that
the slowest rank of a round counts."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import hoplite_mp
from benchmarks.lan.rounds import idle_rate, measured

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.lan.rounds import Array


class Member:
    """A member of a Group, as a Rank."""

    def __init__(self, g: Any, stored: bool = False) -> None:
        """stored: what is given lies in the store."""
        self.size, self.rank = g.size, g.rank
        self.barrier = g.barrier
        self.stored = stored
        self._g = g

    def prepared(self, kind: str, mine: Array) -> Callable[[], Any]:
        """The call, as a user writes it."""
        g = self._g
        if self.stored and mine.size:
            given, mine = mine, g.empty(mine.shape, mine.dtype)
            mine[:] = given
        calls: dict[str, Callable[[], Any]] = {
            "barrier": g.barrier,
            "allreduce": lambda: g.allreduce(mine),
            "reduce": lambda: g.reduce(mine),
            "broadcast": lambda: g.broadcast(mine if g.rank == 0 else None),
            "gather": lambda: g.gather(mine),
            "allgather": lambda: g.allgather(mine),
            "reduce_scatter": lambda: g.reduce_scatter(mine),
            "apart": lambda: g.allreduce(mine),
        }
        return calls[kind]


def main() -> None:
    """Arguments: address, tls (0, 1), stored (0, 1), size, rank, rows as kind:bytes:rounds."""
    address, tls, stored, size, rank, *rows = sys.argv[1:]
    with hoplite_mp.Cluster(
        address=address, tls=None if tls == "1" else False, memory="1500MiB"
    ) as c:
        g = c.group("bench", int(size), int(rank))
        found = measured(Member(g, stored == "1"), rows, idle_rate)
        g.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
