"""Stand-ins for the ports and events of a component that is tested alone."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp._node.output.output import LineSplitter

T = TypeVar("T")


class ManualLoop:
    """See hoplite_mp/_node/ports.py. `watched`: what is called when a descriptor is ready."""

    def __init__(self, now: float = 1000.0) -> None:
        self.time = now
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.watched: dict[int, Callable[[], None]] = {}
        self._order = itertools.count()

    def now(self) -> float:
        return self.time

    def now_ns(self) -> int:
        return round(self.time * 1e9)

    def call_later(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.time + seconds, next(self._order), action))

    def watch(
        self, fd: int, ready: Callable[[], None], *, read: bool = True, write: bool = False
    ) -> None:
        self.watched[fd] = ready

    def unwatch(self, fd: int) -> None:
        self.watched.pop(fd, None)

    def run_in_thread(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        found = work()
        self.call_later(0.0, lambda: done(found))

    def repeat_in_thread(
        self, interval_s: float, work: Callable[[], None], name: str
    ) -> Callable[[], None]:
        over = []

        def again() -> None:
            if not over:
                work()
                self.call_later(interval_s, again)

        self.call_later(interval_s, again)
        return lambda: over.append(True)

    def pass_to(self, time: float) -> None:
        """Calls what is due until then, each at its time."""
        while self.timers and self.timers[0][0] <= time:
            at, _, action = heapq.heappop(self.timers)
            self.time = max(self.time, at)
            action()
        self.time = time

    def pass_time(self, seconds: float) -> None:
        self.pass_to(self.time + seconds)

    def call_all(self) -> None:
        """Calls each timer that waits now, once, whenever it is due."""
        timers, self.timers = sorted(self.timers), []
        for _, _, action in timers:
            action()


class UnhandledEvents:
    """Answers as a node does in which nothing else goes on; tests replace what they need."""

    # What is only heard.
    def delay(self, oid: int) -> None: ...
    def fail_delayed(self, pool: int) -> None: ...
    def pool_deserted(self, pool: int, why: str) -> None: ...
    def remote_workers_lost(self, pool: int) -> None: ...
    def sends_on(self, output_owner: int, host_id: int) -> None: ...
    def ends_elsewhere(self, oid: int) -> None: ...
    def was_full(self, oid: int, host_id: int) -> None: ...
    def refuse_calls(self, pool: int) -> None: ...
    def arrived(self, pool: int) -> None: ...
    def task_ends(self, slot: int) -> None: ...
    def admitted(self, oid: int, task: bytes, demand: Any) -> None: ...
    def dropped(self, task: bytes) -> None: ...
    def drop_unneeded(self) -> None: ...
    def freed(self, oid: int) -> None: ...
    def nobody_named(self, oid: int) -> None: ...
    def result_held(self, oid: int) -> None: ...
    def moved(self, one: Any) -> None: ...
    def ownerless(self, one: Any) -> None: ...
    def owners_handled(self) -> None: ...

    # What is asked.
    def lost_call(self, oid: int, name: str, number: int) -> Exception | None:
        return None

    def lost_actor_call(self, worker: Any, how: str) -> Exception | None:
        return None

    def is_remote_actor(self, pool: int) -> bool:
        return False

    def demand_of(self, oid: int) -> Any:
        return ()

    def target_of(self, oid: int) -> bytes:
        return b""

    def is_actor(self, pool: int) -> bool:
        return False

    def is_round(self, pool: int) -> bool:
        return False

    def admit(self, peer: int, task: bytes, demand: Any, needed: bool) -> bool:
        return False

    def restore_elsewhere(self, oid: int) -> bool | None:
        return False

    def is_inbound(self, oid: int) -> bool:
        return False

    def near(self, object_id: bytes, oid: int) -> memoryview | None:
        return None

    def ask_for_owner(self, one: Any) -> bool:
        return False

    def remote_subscriber(self, output_owner: int) -> Any:
        return None

    def runs_again(self, oid: int) -> bool:
        return False

    def extra_holds(self, oid: int) -> int:
        return 0

    def public(self, oid: int) -> bytes:
        return b""

    def backup_number(self, object_id: bytes, host_id: int) -> int | None:
        return None


class NoEngineCalls:
    """Every group's calls stay where they are."""

    possible = False

    def serve(self, calls: Any) -> None:
        pass

    def look_at_board(self, state: Any) -> None:
        pass

    def add(self, known: Any) -> None:
        pass

    def forget(self, generation: int) -> None:
        pass

    def open(self, state: Any, call: int) -> None:
        pass


def split_in_pieces(lines: LineSplitter, data: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    found = []
    for begin, end in itertools.pairwise(edges):
        found += lines.feed(data[begin:end])
    return [(to, line) for to, run in found + lines.finish() for line in run]


def deliver(component: Any, message: Any) -> None:
    """A message of the manager reaches a component."""
    component.manager_handlers[type(message)](message)
