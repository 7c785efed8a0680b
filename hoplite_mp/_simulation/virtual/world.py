"""The cluster of one run, and the faults of its hosts.

Hosts, the manager and the network refer to each other through the World. A host that dies resets
its connections. A host that is stopped or cut off is declared lost by the shipped code.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._protocol.greetings import Introduction, software_versions
from hoplite_mp._simulation.virtual.host import VirtualHost
from hoplite_mp._simulation.virtual.manager import (
    Promotion,
    Superseding,
    VirtualManager,
    candidate_leadership,
    first_leadership,
)

if TYPE_CHECKING:
    import random

    from hoplite_mp._protocol.spawning import StartStandby
    from hoplite_mp._simulation.virtual.environment import RunEnvironment
    from hoplite_mp._simulation.virtual.processes import VirtualProcess

__all__ = ["World"]

# Time after which the kernel ends a connection whose data is not acknowledged; see
# _transport/sockets.py.
UNACKNOWLEDGED_S = 40.0
# Host ids are consecutive from this number; in production they are random.
HOST_ID_BASE = 1000
MANAGER_PLACE = 0
PROMOTED_S = 5.0  # interval between an operator's attempts to promote a standby
RESTART_S = 0.001  # the minimum time for a supervisor to fork another manager


class World:
    """One cluster. The first host runs the manager. Without a standby, this host never dies."""

    def __init__(self, environment: RunEnvironment) -> None:
        self.environment = environment
        self.timeline = environment.timeline
        self.network = environment.network
        self.board = environment.board
        self.processes = environment.processes
        self.hosts: list[VirtualHost] = []  # the latest incarnation on each machine
        self.incarnations: list[VirtualHost] = []
        self.lost: list[VirtualHost] = []  # incarnations that have ended
        self.manager: VirtualManager | None = None  # the manager on the first host
        self.standby: VirtualManager | None = None
        self.managers = 0  # number of managers that have died
        self.calls_begun = 0  # Group calls begun by any member
        self.takeovers = 0  # number of times that a standby became the manager
        # An operator promoted a host without which the other hosts had continued.
        self.overruled = False
        self._counted: tuple[int, ...] = ()  # nodes that the last manager knew when it ended
        # The standby's host, and the request to start the standby there.
        self._standby_of: tuple[VirtualHost, StartStandby] | None = None
        self.cuts = self.resets = self.stops = self.killed = 0
        # Number of hosts whose links became slow. Such a host sends all data through one queue, in
        # which a heartbeat may wait behind megabytes, so the host may be declared lost.
        self.crawls = 0
        self.leaving: set[VirtualHost] = set()  # incarnations that were asked to leave
        self.departed: set[VirtualHost] = set()  # incarnations in `leaving` whose node has ended
        self.struck: set[int] = set()  # machines affected by any fault
        # Incarnations whose node ended because it had been declared lost.
        self.excluded: list[VirtualHost] = []
        self._introduction = Introduction(HOST_ID_BASE, software_versions())

    # -- starts ----------------------------------------------------------------------------

    def _start_manager(self, again: bool) -> VirtualManager:
        environment = self.environment
        return VirtualManager(
            self.board,
            MANAGER_PLACE,
            environment.manager_at,
            host_id=HOST_ID_BASE,
            cluster=environment.cluster,
            introduction=self._introduction,
            beat_s=environment.config.heartbeat_interval_s,
            heartbeat_timeout_s=environment.config.heartbeat_timeout_s,
            again=again,
            leadership=first_leadership(environment, again),
            turned=self._manager_turned,
        )

    def _start_standby(self, host: VirtualHost, request: StartStandby) -> None:
        environment = self.environment
        (at,) = environment.standby_at
        host_id, place = host.host_id, host.place
        candidate, leadership = candidate_leadership(environment, request.node)
        standby = VirtualManager(
            self.board,
            place,
            at,
            host_id=host_id,
            cluster=environment.cluster,
            introduction=Introduction(host_id, software_versions()),
            beat_s=environment.config.heartbeat_interval_s,
            heartbeat_timeout_s=environment.config.heartbeat_timeout_s,
            again=True,
            own=request.node,
            leadership=leadership,
            turned=self._manager_turned,
        )
        self._standby_of = host, request
        self.board.kept_open.add(at)
        self.standby = standby

        def won(term: int) -> None:
            self.timeline.note(f"the standby leads in term {term}")
            self.takeovers += 1
            # Voters may not know that this host was declared lost, because the manager may not have
            # informed any living node.
            given_up = bool(self._counted) and request.node not in self._counted
            self.overruled = self.overruled or given_up or candidate.is_struck(candidate.votes)
            Superseding(environment, standby.loop, place, host_id, environment.manager_at).begin(
                term
            )

        leadership.on_won = won

    def add_host(self, up: float, down: float) -> VirtualHost:
        """Adds a machine, whose node joins. The first machine runs the manager."""
        place = self.network.add(up, down)
        self.hosts.append(self._begin(place))
        return self.hosts[-1]

    def _begin(self, place: int) -> VirtualHost:
        host_id = HOST_ID_BASE + len(self.incarnations)
        local_stream = None
        if not self.incarnations:
            self.board.kept_open.add(self.environment.manager_at)
            self.manager = self._start_manager(False)
            # VirtualHost replaces the loop of this stream by its node's loop.
            local_stream = self.manager.connect_locally(self.manager.loop)
        host = VirtualHost(
            self.environment, place, host_id, self.end, self._start_standby, local_stream
        )
        self.incarnations.append(host)
        return host

    def rejoin(self, place: int) -> None:
        """Starts a new incarnation on the machine."""
        if not self.hosts[place].alive:
            self.timeline.note(f"host {place} joins again")
            self.resume(place)
            self.hosts[place] = self._begin(place)

    def host_of(self, process: VirtualProcess | None) -> VirtualHost | None:
        """Returns the host on which the process runs."""
        return next((host for host in self.incarnations if process in host.processes), None)

    # -- ends ----------------------------------------------------------------------------------

    def end(self, host: VirtualHost, why: str) -> None:
        """Ends a host. Its connections are reset at the other ends."""
        if not host.alive:
            return
        self.timeline.note(f"host {host.place} ends: {why}")
        self.struck.add(host.place)
        host.die()
        self.lost.append(host)
        lifecycle = host.node.components.lifecycle
        if lifecycle.stopping and host not in self.leaving:
            self.excluded.append(host)
        elif lifecycle.stopping and not lifecycle.given_up:
            self.departed.add(host)
        if host is self.incarnations[0]:
            self._end_manager()
            self.board.kept_open.discard(self.environment.manager_at)
            if self.environment.standby_at:
                self.timeline.after(PROMOTED_S, self._promote)
        if self._standby_of is not None and self._standby_of[0] is host:
            self._end_standby()
            self.board.kept_open.difference_update(self.environment.standby_at)
            self._standby_of = None
        self._reset_all(host.loop, host.place)

    def _reset_all(self, loop: object, place: int) -> None:
        network = self.network
        for end in self.board.close_all(loop):
            delay = network.delay(place, end.host)
            self.timeline.after(delay, network.deliver, place, end.host, end.reset)

    # -- managers ------------------------------------------------------------------------------

    def _manager_turned(self) -> None:
        """Called after a turn of a manager or standby: checks that at most one may decide, and ends
        a manager that steps down."""
        if self.manager is not None and self.standby is not None:
            both = self.manager.decides and self.standby.decides
            if both:
                raise AssertionError("the manager and the standby both decide")
        if self.manager is not None and self.manager.is_out:
            self.end(self.incarnations[0], "its manager steps down")
        elif self.standby is not None and self.standby.is_out:
            assert self._standby_of is not None
            self.end(self._standby_of[0], "its manager steps down")

    def _end_process(self, manager: VirtualManager | None) -> bool:
        """Ends the process of a manager or standby. Returns False if there was none."""
        if manager is not None:
            manager.loop.ended = True
            self._reset_all(manager.loop, manager.host)
        return manager is not None

    def _end_manager(self) -> bool:
        manager, self.manager = self.manager, None
        if manager is not None:
            # A manager that dies before any node has reported to it knows no nodes.
            self._counted = manager.planner.membership.nodes or self._counted
        return self._end_process(manager)

    def _end_standby(self) -> bool:
        standby, self.standby = self.standby, None
        return self._end_process(standby)

    def kill_manager(self, downtime_s: float) -> None:
        """Kills the manager's process. Another one is started after the given time."""
        if self._end_manager():
            self.timeline.note("the manager dies")
            self.managers += 1
            self.timeline.after(max(downtime_s, RESTART_S), self._manager_again)

    def _manager_again(self) -> None:
        node = self.incarnations[0]
        if node.alive:
            self.timeline.note("another manager is started")
            manager = self.manager = self._start_manager(True)
            stream = manager.connect_locally(node.loop)
            node.loop.run_soon(partial(node.node.components.management.again, stream))

    def kill_standby(self, downtime_s: float) -> None:
        """Like kill_manager, for the standby, which may be the manager."""
        if self._end_standby():
            self.timeline.note("the standby dies")
            self.timeline.after(max(downtime_s, RESTART_S), self._standby_again)

    def _standby_again(self) -> None:
        if self._standby_of is not None and self.standby is None:
            self.timeline.note("another standby is started")
            self._start_standby(*self._standby_of)

    def _promote(self) -> None:
        """Called when the manager's host is lost permanently. An operator promotes the standby, in
        case the nodes that can vote are not a majority."""
        if self.standby is None or self.standby.leads:
            return
        Promotion(self.environment, self.standby.host, *self.environment.standby_at).begin()
        self.timeline.after(PROMOTED_S, self._promote)

    def leave(self, place: int) -> None:
        """Makes a node leave. Does nothing for the node of the manager's host."""
        host = self.hosts[place]
        cluster_node = host.cluster_node
        if cluster_node is not None and host.node.components.management.host_id != host.host_id:
            self.leaving.add(host)
            self.struck.add(place)
            host.loop.run(cluster_node.draining.begin)

    def kill_one(self, rng: random.Random) -> None:
        """Kills a random worker or program."""
        found = [
            (host, process)
            for host in self.hosts
            if host.alive
            for process in host.processes
            if process.alive
        ]
        if found:
            self.kill(*rng.choice(found))

    def kill(self, host: VirtualHost, process: VirtualProcess) -> None:
        """Kills a process, as SIGKILL does."""
        self.timeline.note(f"{process.name} on host {host.place} is killed")
        self.killed += 1
        self.struck.add(host.place)
        host.kill(process)

    # -- stops and cuts ------------------------------------------------------------------------

    def stop(self, place: int) -> None:
        """Stops a machine."""
        self.stops += 1
        self.struck.add(place)
        self.network.stop(place)

    def resume(self, place: int) -> None:
        """Resumes a stopped machine."""
        self.network.resume(place)

    def cut(self, some: set[int], others: set[int]) -> None:
        """Cuts all traffic between these hosts. Their connections end if the cut lasts longer than
        UNACKNOWLEDGED_S."""
        self.cuts += 1
        self.struck |= some | others
        self.network.separate(some, others)
        self.timeline.after(UNACKNOWLEDGED_S, self._reset_if_cut, some, others)

    def _reset_if_cut(self, some: set[int], others: set[int]) -> None:
        for one in some:
            for other in others:
                if (one, other) in self.network.cut:
                    self.reset(one, other)

    def heal(self, some: set[int], others: set[int]) -> None:
        """Ends a cut made by `cut`."""
        self.network.join(some, others)

    def reset(self, one: int, other: int) -> None:
        """Resets all connections between two machines."""
        self.resets += 1
        self.struck |= {one, other}
        for stream in self.board.between(one, other):
            stream.out.close()
            stream.peer.out.close()
            stream.reset()
            stream.peer.reset()

    def close(self) -> None:
        """Frees everything after the run."""
        for host in self.incarnations:
            host.close()
