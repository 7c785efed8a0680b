"""Programs of a run: where they are, how they find each other's objects, what they may use.

Why it exists: whatever programs do, they are begun, judged and counted in the same way.
It must never know: what they do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hoplite_mp.cluster import Cluster
from hoplite_mp.errors import HopliteTimeoutError
from hoplite_mp.simulation.cluster.truth import WrongEnd

if TYPE_CHECKING:
    from collections.abc import Callable

    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef
    from hoplite_mp.simulation.cluster.host import Host
    from hoplite_mp.simulation.cluster.truth import Truth
    from hoplite_mp.simulation.cluster.world import World

__all__ = ["HANGS_S", "Board", "Programs"]

ITEMS = (0, 1, 100, 3_000, 20_000, 100_000)  # of 8 bytes
# Bytes that all collectives of a run together want to move, about: what a run may cost.
BYTES_MAX = 16 << 20
# A program waits for another one at most so long; what has failed by then is never made.
PATIENCE_S = 25.0
# How long somebody waits for a result before it counts as hanging.
HANGS_S = 90.0


@dataclass(eq=False)
class Board:
    """How programs of a run find each other's objects: ids by name, outside of what is tested."""

    world: World
    ids: dict[str, bytes | None] = field(default_factory=dict)  # None: it will never be there

    def publish(self, name: str, object_id: bytes | None) -> None:
        """From now on others know it."""
        self.ids.setdefault(name, object_id)
        self.world.processes.wake_all(("board", name))

    def find(self, name: str) -> bytes | None:
        """Waits until it is there. None: it never will be."""
        running = self.world.processes.running
        assert running is not None
        if name not in self.ids:
            running.wait(("board", name), PATIENCE_S)
        return self.ids.get(name)


class Programs:
    """Of one run. `groups`: Groups that were begun; `begun`: programs."""

    def __init__(self, world: World, truth: Truth, span_s: float) -> None:
        """span_s: within which they begin."""
        self.world = world
        self.truth = truth
        self.chance = world.timeline.chance
        self.span_s = span_s
        self.board = Board(world)
        self.left = BYTES_MAX
        self.begun = self.groups = 0
        self._operations = 0

    @property
    def open(self) -> list[str]:
        """Names of programs that live and have not ended."""
        return [process.name for host in self.world.lives for process in host.programs
                if process.alive]  # fmt: skip

    def hosts(self) -> list[Host]:
        """Those whose node is in the cluster, as far as it knows."""
        stopped = self.world.network.stopped
        return [one for one in self.world.hosts if one.alive and one.number >= 0
                and one.place not in stopped]  # fmt: skip

    def items(self, copies: int) -> int:
        """How long a value is of which there will be so many."""
        room = self.left // max(1, 8 * copies)
        items = self.chance.choice([one for one in ITEMS if one <= max(1, room)])
        self.left -= 8 * items * copies
        return items

    def salt(self) -> int:
        """For the values of one operation: an odd number."""
        self._operations += 1
        return 2 * self._operations % 1024 + 1

    def program(
        self,
        host: Host,
        name: str,
        body: Callable[[Cluster], object],
        holds: Callable[[], bool] = lambda: False,
    ) -> None:
        """Runs it on that host, as a program that attaches to its node. holds: whether any error is
        wrong, with all that has happened so far."""

        def live(runtime: Runtime) -> None:
            try:
                body(Cluster._of(runtime))
            except Exception as error:
                self.truth.check_error(name, error, holds())

        self.begun += 1
        host.attach(name, live)

    def ref(self, c: Cluster, name: str) -> ObjectRef[Any] | None:
        """Of an object that another program has published; None: there is none."""
        object_id = self.board.find(name)
        if object_id is None:
            return None
        return c._runtime.memory.make_ref(object_id)

    def value(self, c: Cluster, ref: Any, what: str) -> Any:
        """What is read; a wait that does not end is a failure of the run."""
        try:
            return c.get(ref, timeout=HANGS_S)
        except HopliteTimeoutError as error:
            raise WrongEnd(f"{what} hangs") from error
