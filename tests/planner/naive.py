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
    gather: bool
    reproducible: bool
    deadline_at: float | None
    passed: bool = False
    history: list[tuple[str, int]] = field(default_factory=list)
    epoch: int = 0
    members: list[int] | None = None  # while a plan is executed

    def report(self, what: str, index: int) -> None:
        letter = self.sources[index] if index < len(self.sources) else None
        self.history += [(what, i) for i, other in enumerate(self.sources) if other == letter]

    def failed(self) -> list[int]:
        seen: list[int] = []
        for what, index in self.history:
            if what == "failed" and index not in seen:
                seen.append(index)
        return seen

    def ready(self) -> list[int]:
        seen: list[int] = []
        for what, index in self.history:
            if what == "ready" and index not in seen and index not in self.failed():
                seen.append(index)
        return seen

    def decide(self) -> str:
        """`wait`, `fail`, or `go` with `ready()[:num]`."""
        need = 1 if self.passed else self.num
        if len(self.sources) - len(self.failed()) < need:
            return "fail"
        return "go" if len(self.ready()) >= need else "wait"


Who = tuple[int, int, int]  # node, client, generation


@dataclass
class NaiveGroup:
    """A group as a row of seats."""

    size: int
    seats: dict[int, Who] = field(default_factory=dict)
    joining: set[int] = field(default_factory=set)
    formed: bool = False
    seen_by: set[int] = field(default_factory=set)
    shown: tuple[int, int, bool] | None = None

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
