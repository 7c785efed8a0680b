"""The common parts of simulated programs: start, checks, hosts, exchange of objects, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._api.cluster import Cluster
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp.errors import HopliteTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._simulation.oracle.oracle import Oracle
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["BYTES_MAX", "DEATHS_MAX", "HANGS_S", "Board", "Programs"]

ITEMS = (0, 1, 100, 3_000, 20_000, 100_000)  # of 8 bytes each
# Approximate limit for the bytes moved by all collectives of a run.
BYTES_MAX = 16 << 20
# Timeout of a program that waits for another one to publish an object.
PATIENCE_S = 25.0
# The longest time until a node knows a new member, without faults.
MEMBERSHIP_S = 1.0
# A wait for a result that takes longer counts as a hang.
HANGS_S = 90.0
# Deaths of hosts and processes that a task survives: it runs at most four times (Config.retries).
DEATHS_MAX = 2


@dataclass(eq=False)
class Board:
    """Ids of published objects by name. Programs exchange them without the code under test."""

    world: World
    ids: dict[str, bytes | None] = field(default_factory=dict)  # None: never published

    def publish(self, name: str, object_id: bytes | None) -> None:
        """Publishes an id under the name. None: there will be no object."""
        self.ids.setdefault(name, object_id)
        self.world.processes.wake_all(("board", name))

    def find(self, name: str, patience_s: float = PATIENCE_S) -> bytes | None:
        """Waits for the name and returns its id. None: there is no object, or the wait timed
        out."""
        running = self.world.processes.running
        assert running is not None
        if name not in self.ids:
            running.wait(("board", name), patience_s)
        return self.ids.get(name)


class Programs:
    """The programs of one run. `groups`: number of started Groups; `begun`: of started programs."""

    def __init__(self, world: World, oracle: Oracle, span_s: float) -> None:
        """span_s: the period in which programs start."""
        self.world = world
        self.oracle = oracle
        self.rng = world.timeline.rng
        self.span_s = span_s
        self.board = Board(world)
        self.bytes_left = BYTES_MAX
        self.begun = self.groups = 0
        self._operations = 0

    @property
    def open(self) -> list[str]:
        """The names of living programs."""
        return [process.name for host in self.world.incarnations for process in host.programs
                if process.alive]  # fmt: skip

    def hosts(self) -> list[VirtualHost]:
        """Returns the running hosts whose node has been admitted."""
        stopped = self.world.network.stopped
        return [one for one in self.world.hosts if one.alive and one.number >= 0
                and one.place not in stopped]  # fmt: skip

    def items(self, copies: int) -> int:
        """Draws the number of items of a value with `copies` copies."""
        items_max = self.bytes_left // max(1, 8 * copies)
        items = self.rng.choice([one for one in ITEMS if one <= max(1, items_max)])
        self.bytes_left -= 8 * items * copies
        return items

    def salt(self) -> int:
        """Returns an odd number for the values of one operation."""
        self._operations += 1
        return 2 * self._operations % 1024 + 1

    def no_errors_on(self, *hosts: VirtualHost, tasks: bool = False) -> Callable[[], bool]:
        """Returns a condition for `program`: no error is allowed as long as no fault has affected
        these hosts or those of managers. tasks: tasks take part, which may run on any host."""
        return partial(self._no_errors_on, {host.place for host in hosts}, tasks)

    def _no_errors_on(self, places: set[int], tasks: bool) -> bool:
        world = self.world
        if self.oracle.small_stores or world.struck & (places | world.environment.managers):
            return False
        disturbed = world.cuts or world.resets or world.stops
        return not (tasks and (disturbed or len(world.lost) + world.killed > DEATHS_MAX))

    def program(
        self,
        host: VirtualHost,
        name: str,
        body: Callable[[Cluster], object],
        holds: Callable[[], bool] = lambda: False,
    ) -> None:
        """Runs a program that attaches to the host's node. holds: returns whether no error is
        allowed, after the faults so far."""

        def run_program(runtime: Runtime) -> None:
            try:
                body(Cluster._of(runtime))
            except Exception as error:
                self.oracle.check_error(name, error, holds())

        self.begun += 1
        host.attach(name, run_program)

    def kill(self, name: str) -> bool:
        """Kills the program of that name. False if no such program is running."""
        killed = False
        for host in self.world.hosts:
            for process in host.programs:
                if process.name == name and process.alive and host.alive:
                    self.world.kill(host, process)
                    killed = True
        return killed

    def await_nodes(self, host: VirtualHost, names: Sequence[str]) -> None:
        """Waits until the host's node knows these nodes. In production, a program gets names of
        nodes from its own node; here the name may be that of a host that has just joined."""
        import time

        cluster_node, until = host.cluster_node, self.world.timeline.now + MEMBERSHIP_S
        if cluster_node is None:
            return
        wanted = {int(name.removeprefix("h")) for name in names} - {host.number}
        while (
            wanted - cluster_node.host.roster.by_number.keys() and self.world.timeline.now < until
        ):
            time.sleep(MEMBERSHIP_S / 100)

    def ref(self, c: Cluster, name: str) -> ObjectRef[Any] | None:
        """Returns a ref to a published object; None if there is none."""
        object_id = self.board.find(name)
        if object_id is None:
            return None
        return c._runtime.memory.make_ref(object_id)

    def value(self, c: Cluster, ref: Any, what: str) -> Any:
        """Reads a value. A timeout fails the run."""
        try:
            return c.get(ref, timeout=HANGS_S)
        except HopliteTimeoutError as error:
            raise WrongEnd(f"{what} hangs") from error
