"""The planner's rules once more, as slowly and plainly as they can be said.

Nothing is kept but what happened; every answer is worked out from the beginning. It shares no code
with the planner, and the messages only as values that are compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NaiveOperation:
    """A collective as the list of all that was reported about it."""

    node: int
    sources: str
    num: int
    kind: str
    to: tuple[int, ...]
    reproducible: bool
    deadline_at: float | None
    groups: list[list[int]]  # of each, one source takes part; every source is in one
    passed: bool = False
    history: list[tuple[str, int, int]] = field(default_factory=list)  # what, index, node
    epoch: int = 0
    members: list[int] | None = None  # while a plan is executed
    told: set[int] = field(default_factory=set)  # nodes that have the latest plan
    gives: set[int] = field(default_factory=set)  # those of them that others depend on
    unfinished: set[int] = field(default_factory=set)
    destinations: tuple[int, ...] = ()
    lost: set[int] = field(default_factory=set)  # nodes that have died since the latest plan

    def report(self, what: str, index: int, node: int = 0) -> None:
        letter = self.sources[index] if index < len(self.sources) else None
        self.history += [(what, i, node) for i, other in enumerate(self.sources) if other == letter]

    def lose(self, node: int) -> None:
        self.history.append(("lost", -1, node))
        self.lost.add(node)

    def plan_for(self, destinations: tuple[int, ...]) -> None:
        """From now on the results go there. A next life of a lost host may be among them."""
        self.destinations = destinations
        self.lost.difference_update(destinations)

    def replay(self) -> tuple[dict[int, set[int]], list[int]]:
        """Holders of ready sources in order of arrival, and failed sources in order of failing."""
        ready: dict[int, set[int]] = {}
        failed: list[int] = []
        for what, index, node in self.history:
            if what == "ready" and index not in failed:
                ready.setdefault(index, set()).add(node)
            elif what == "failed":
                ready.pop(index, None)
                failed += [index] if index not in failed else []
            elif what == "gone":  # from one of its holders, or it was never there
                if node in ready.get(index, ()) and len(ready[index]) > 1:
                    ready[index].discard(node)
                else:
                    ready.pop(index, None)
                    failed += [index] if index not in failed else []
            elif what == "lost":
                for one in list(ready):
                    ready[one].discard(node)
                    if not ready[one]:
                        del ready[one]
                        failed.append(one)
        return ready, failed

    def failed(self) -> list[int]:
        return self.replay()[1]

    def ready(self) -> list[int]:
        return list(self.replay()[0])

    def group(self, index: int) -> list[int]:
        return next(group for group in self.groups if index in group)

    def chosen(self) -> list[int]:
        """The ready sources that no earlier one of their group has preceded, up to `num`."""
        ready = self.ready()
        firsts = [
            index
            for at, index in enumerate(ready)
            if not set(self.group(index)).intersection(ready[:at])
        ]
        return firsts[: self.num]

    def in_order(self, chosen: list[int]) -> list[int]:
        """One of each group, in the order of the groups."""
        return [index for group in self.groups for index in group if index in chosen]

    def cause(self) -> int:
        """The failure after which, for the first time, a whole group had failed."""
        failed = self.failed()
        return next(
            index
            for at, index in enumerate(failed)
            if set(self.group(index)).issubset(failed[: at + 1])
        )

    def decide(self) -> str:
        """`wait`, `fail`, or `go` with `chosen()`."""
        need = 1 if self.passed else self.num
        failed, ready = self.failed(), self.ready()
        if sum(not set(group).issubset(failed) for group in self.groups) < need:
            return "fail"
        return (
            "go" if sum(any(i in ready for i in group) for group in self.groups) >= need else "wait"
        )


Who = tuple[int, int, int]  # node, client, generation


@dataclass
class NaiveGroup:
    """A group as a row of seats."""

    size: int
    seats: dict[int, Who] = field(default_factory=dict)
    joining: set[int] = field(default_factory=set)
    formed: bool = False
    seen_by: set[int] = field(default_factory=set)
    shown: tuple[tuple[int, int, bool], tuple[int, ...]] | None = None

    def sit(self, who: Who, rank: int) -> None:
        if self.formed:
            self.joining.add(rank)
        self.seats[rank] = who
        self.seen_by.add(who[0])
        self.formed = self.formed or len(self.seats) == self.size

    def stand_up(self, *ranks: int) -> None:
        for rank in ranks:
            del self.seats[rank]
            self.joining.discard(rank)
        if not set(self.seats) - self.joining:
            self.joining.clear()

    def masks(self) -> tuple[int, int, bool]:
        alive = sum(2**rank for rank in self.seats if rank not in self.joining)
        return alive, sum(2**rank for rank in self.joining), self.formed

    def former(self) -> tuple[int, ...]:
        """Nodes that had members, and are still asked what those have given."""
        return tuple(sorted(self.seen_by - {who[0] for who in self.seats.values()}))
