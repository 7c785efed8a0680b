"""What goes wrong in a run, drawn by chance.

Why it exists: hosts die, stop for a while or for good, are cut off, crawl, join and join again;
connections between two that live are reset, and what was said last is said again. Two at a time
happen as often as one.
It must never know: what is being done meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hoplite_mp.simulation.world import World

__all__ = ["Faults"]

# As often as they stand here.
KINDS = ("die", "die", "die", "stop", "pause", "crawl", "cut", "join", "reset", "again", "again",
         "leave", "manager")  # fmt: skip
# Most runs have few, so that what is left is worth looking at.
COUNTS = (0, 1, 1, 2, 2, 3, 5, 8)


class Faults:
    """Of one run."""

    def __init__(self, world: World, span_s: float) -> None:
        """span_s: within which they come."""
        self.world = world
        self.chance = world.timeline.chance
        self.span_s = span_s
        self.happened: list[str] = []
        self.crawling: set[int] = set()

    def begin(self) -> None:
        """Schedules them."""
        at = [self.chance.random() * self.span_s for _ in range(self.chance.choice(COUNTS))]
        if len(at) > 1 and self.chance.random() < 0.5:
            at[1] = at[0] + self.chance.random() * 0.002  # during the repair of the first
        for when in at:
            self.world.timeline.after(when, self._one)

    def _one(self) -> None:
        kind = self.chance.choice(KINDS)
        hosts = [node.host for node in self.world.hosts[1:] if node.alive and node.members]
        host = self.chance.choice(hosts) if hosts else 0
        if kind != "join" and not host:
            return
        self.happened.append(kind)
        self.world.timeline.note(f"fault: {kind} {host}")
        getattr(self, f"_{kind}")(host)

    def _soon(self) -> float:
        return self.chance.choice([0.001, 0.05, 0.5]) * self.chance.random()

    def _die(self, host: int) -> None:
        self.world.die(host)
        if self.chance.random() < 0.4:
            same = self.chance.random() < 0.5
            self.world.timeline.after(self._soon(), self.world.rejoin, host, same)

    def _stop(self, host: int) -> None:
        """For long enough to be given up."""
        self.world.stop(host)
        if self.chance.random() < 0.6:
            self.world.timeline.after(2.0 + self._soon(), self._back, host)

    def _pause(self, host: int) -> None:
        """Not for so long: nobody is given up."""
        self.world.stop(host)
        self.world.timeline.after(self.chance.random() * 1.4, self.world.go_on, host)

    def _back(self, host: int) -> None:
        self.world.go_on(host)
        self.world.timeline.after(0.1, self.world.rejoin, host, False)

    def _crawl(self, host: int) -> None:
        if host not in self.crawling:
            self.crawling.add(host)
            self.world.crawl(host, self.chance.choice([0.02, 0.05, 0.3]))

    def _cut(self, host: int) -> None:
        """Some hosts from the others, or two from each other."""
        others = [node.host for node in self.world.hosts if node.host != host]
        some = {host}
        if self.chance.random() < 0.3:
            some.add(self.chance.choice(others))
        rest = set(others) - some
        if not rest:
            return
        if self.chance.random() < 0.4:
            rest = {self.chance.choice(sorted(rest))}
        self.world.cut(some, rest)
        seconds = self.chance.choice([0.01, 0.5, 3.0, 50.0])
        self.world.timeline.after(seconds, self.world.heal, some, rest)

    def _join(self, host: int) -> None:
        rate = self.world.network.ports[0].up
        self.world.add_host(rate, rate)

    def _reset(self, host: int) -> None:
        others = [node.host for node in self.world.hosts if node.host != host and node.alive]
        if others:
            self.world.reset(host, self.chance.choice(others))

    def _again(self, host: int) -> None:
        self.world.hosts[host].say_again()

    def _manager(self, host: int) -> None:
        self.world.lose_manager(self.chance.choice([0.0, 0.02, 0.5]))

    def _leave(self, host: int) -> None:
        self.world.leave(host)
