"""All parts of one run, and everything that can happen to a host.

Hosts, the manager and the network refer to each other through this. A host that dies resets its
connections; a host that is stopped or cut off is declared lost by the real code in due time.
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
# In a cluster host ids are random; here they are consecutive from this number on.
HOST_ID_BASE = 1000
MANAGER_PLACE = 0
PROMOTED_S = 5.0  # interval at which an operator checks whether to promote a standby
RESTART_S = 0.001  # the minimum time for a supervisor to fork another manager


class World:
    """One cluster. The first host has the manager; that host never dies if there is no standby."""

    def __init__(self, around: RunEnvironment) -> None:
        self.around = around
        self.timeline = around.timeline
        self.network = around.network
        self.board = around.board
        self.processes = around.processes
        self.hosts: list[VirtualHost] = []  # the latest life on each machine
        self.lives: list[VirtualHost] = []
        self.lost: list[VirtualHost] = []  # lives that have ended
        self.manager: VirtualManager | None = None  # the manager on the first host
        self.standby: VirtualManager | None = None
        self.managers = 0  # number of managers that have died
        self.calls_begun = 0  # calls of Groups begun by any member
        self.taken_over = 0  # how often a standby has won
        # A user has made a host lead although the other hosts had continued without it.
        self.overruled = False
        self._counted: tuple[int, ...] = ()  # the nodes of the last manager's hosts when it ended
        # The standby's host, and the request to start the standby there.
        self._standby_of: tuple[VirtualHost, StartStandby] | None = None
        self.cuts = self.resets = self.stops = self.killed = 0
        # Hosts whose links became slow. All data of such a host leaves in one queue here, in which
        # a heartbeat may wait behind megabytes, so the host may be declared lost.
        self.crawls = 0
        self.left: set[VirtualHost] = set()  # lives that were asked to leave
        self.went: set[VirtualHost] = set()  # those of them whose node has ended by itself
        self.struck: set[int] = set()  # machines at which any fault has struck
        # Lives whose node ended because it detected that it had been declared lost.
        self.gave_up: list[VirtualHost] = []
        self._introduction = Introduction(HOST_ID_BASE, software_versions())

    # -- beginnings ----------------------------------------------------------------------------

    def _start_manager(self, again: bool) -> VirtualManager:
        around = self.around
        return VirtualManager(
            self.board,
            MANAGER_PLACE,
            around.manager_at,
            host_id=HOST_ID_BASE,
            cluster=around.cluster,
            introduction=self._introduction,
            beat_s=around.config.heartbeat_interval_s,
            heartbeat_timeout_s=around.config.heartbeat_timeout_s,
            again=again,
            leadership=first_leadership(around, again),
            turned=self._manager_turned,
        )

    def _start_standby(self, host: VirtualHost, ask: StartStandby) -> None:
        around = self.around
        (at,) = around.standby_at
        host_id, place = host.host_id, host.place
        candidate, leadership = candidate_leadership(around, ask.node)
        standby = VirtualManager(
            self.board,
            place,
            at,
            host_id=host_id,
            cluster=around.cluster,
            introduction=Introduction(host_id, software_versions()),
            beat_s=around.config.heartbeat_interval_s,
            heartbeat_timeout_s=around.config.heartbeat_timeout_s,
            again=True,
            own=ask.node,
            leadership=leadership,
            turned=self._manager_turned,
        )
        self._standby_of = host, ask
        self.board.kept_open.add(at)
        self.standby = standby

        def won(term: int) -> None:
            self.timeline.note(f"the standby leads in term {term}")
            self.taken_over += 1
            # Voters need not know that this host was declared lost, because the manager has not
            # informed any living node of that.
            given_up = bool(self._counted) and ask.node not in self._counted
            self.overruled = self.overruled or given_up or candidate.is_struck(candidate.votes)
            Superseding(around, standby.loop, place, host_id, around.manager_at).begin(term)

        leadership.on_won = won

    def add_host(self, up: float, down: float) -> VirtualHost:
        """Adds a machine, whose node joins. The first machine has the manager."""
        place = self.network.add(up, down)
        self.hosts.append(self._begin(place))
        return self.hosts[-1]

    def _begin(self, place: int) -> VirtualHost:
        host_id = HOST_ID_BASE + len(self.lives)
        near = None
        if not self.lives:
            self.board.kept_open.add(self.around.manager_at)
            self.manager = self._start_manager(False)
            near = self.manager.near(self.manager.loop)  # Host replaces this loop by its node's
        host = VirtualHost(self.around, place, host_id, self.end, self._start_standby, near)
        self.lives.append(host)
        return host

    def rejoin(self, place: int) -> None:
        """Begins a new life on the machine."""
        if not self.hosts[place].alive:
            self.timeline.note(f"host {place} joins again")
            self.go_on(place)
            self.hosts[place] = self._begin(place)

    def host_of(self, process: VirtualProcess | None) -> VirtualHost | None:
        """The life of the host on which the process runs."""
        return next((host for host in self.lives if process in host.processes), None)

    # -- ends ----------------------------------------------------------------------------------

    def end(self, host: VirtualHost, why: str) -> None:
        """Ends a life and its connections, which the other ends detect."""
        if not host.alive:
            return
        self.timeline.note(f"host {host.place} ends: {why}")
        self.struck.add(host.place)
        host.die()
        self.lost.append(host)
        lifecycle = host.node.components.lifecycle
        if lifecycle.stopping and host not in self.left:
            self.gave_up.append(host)
        elif lifecycle.stopping and not lifecycle.given_up:
            self.went.add(host)
        if host is self.lives[0]:
            self._end_manager()
            self.board.kept_open.discard(self.around.manager_at)
            if self.around.standby_at:
                self.timeline.after(PROMOTED_S, self._promote)
        if self._standby_of is not None and self._standby_of[0] is host:
            self._end_standby()
            self.board.kept_open.difference_update(self.around.standby_at)
            self._standby_of = None
        self._reset_all(host.loop, host.place)

    def _reset_all(self, loop: object, place: int) -> None:
        network = self.network
        for end in self.board.close_all(loop):
            delay = network.delay(place, end.host)
            self.timeline.after(delay, network.pass_on, place, end.host, end.break_off)

    # -- managers ------------------------------------------------------------------------------

    def _manager_turned(self) -> None:
        """A manager or standby has had a turn: checks that at most one may decide, and ends a
        manager that steps down."""
        if self.manager is not None and self.standby is not None:
            both = self.manager.decides and self.standby.decides
            if both:
                raise AssertionError("the manager and the standby both decide")
        if self.manager is not None and self.manager.is_out:
            self.end(self.lives[0], "its manager steps down")
        elif self.standby is not None and self.standby.is_out:
            assert self._standby_of is not None
            self.end(self._standby_of[0], "its manager steps down")

    def _end_process(self, manager: VirtualManager | None) -> bool:
        """Ends the process of a manager or a standby. False if there was none."""
        if manager is not None:
            manager.loop.over = True
            self._reset_all(manager.loop, manager.host)
        return manager is not None

    def _end_manager(self) -> bool:
        manager, self.manager = self.manager, None
        if manager is not None:
            # A manager that dies before its nodes have reported to it has not counted any node yet.
            self._counted = manager.planner.membership.nodes or self._counted
        return self._end_process(manager)

    def _end_standby(self) -> bool:
        standby, self.standby = self.standby, None
        return self._end_process(standby)

    def lose_manager(self, away_s: float) -> None:
        """The manager's process dies; another one is started after the given time."""
        if self._end_manager():
            self.timeline.note("the manager dies")
            self.managers += 1
            self.timeline.after(max(away_s, RESTART_S), self._manager_again)

    def _manager_again(self) -> None:
        node = self.lives[0]
        if node.alive:
            self.timeline.note("another manager is started")
            manager = self.manager = self._start_manager(True)
            stream = manager.near(node.loop)
            node.loop.run_soon(partial(node.node.components.management.again, stream))

    def lose_standby(self, away_s: float) -> None:
        """As lose_manager, for the standby, which may be leading."""
        if self._end_standby():
            self.timeline.note("the standby dies")
            self.timeline.after(max(away_s, RESTART_S), self._standby_again)

    def _standby_again(self) -> None:
        if self._standby_of is not None and self.standby is None:
            self.timeline.note("another standby is started")
            self._start_standby(*self._standby_of)

    def _promote(self) -> None:
        """Called when the manager's host is lost for good: an operator promotes the standby, in
        case fewer than a majority of nodes are left to vote."""
        if self.standby is None or self.standby.leads:
            return
        Promotion(self.around, self.standby.host, *self.around.standby_at).begin()
        self.timeline.after(PROMOTED_S, self._promote)

    def leave(self, place: int) -> None:
        """Asks a node to leave in order; the node of the manager's host is not asked."""
        host = self.hosts[place]
        lan = host.lan
        if lan is not None and host.node.components.management.host_id != host.host_id:
            self.left.add(host)
            self.struck.add(place)
            host.loop.run(lan.draining.begin)

    def kill_one(self, chance: random.Random) -> None:
        """Kills a worker or a program of some living host."""
        found = [
            (host, process)
            for host in self.hosts
            if host.alive
            for process in host.processes
            if process.alive
        ]
        if found:
            self.kill(*chance.choice(found))

    def kill(self, host: VirtualHost, process: VirtualProcess) -> None:
        """Kills a process, as SIGKILL does."""
        self.timeline.note(f"{process.name} on host {host.place} is killed")
        self.killed += 1
        self.struck.add(host.place)
        host.kill(process)

    # -- obstacles -------------------------------------------------------------------------------

    def stop(self, place: int) -> None:
        """Stops a machine."""
        self.stops += 1
        self.struck.add(place)
        self.network.stop(place)

    def go_on(self, place: int) -> None:
        """A stopped machine continues."""
        self.network.go_on(place)

    def cut(self, some: set[int], others: set[int]) -> None:
        """Cuts all traffic between these hosts. Their connections end if they are still cut off
        from each other after UNACKNOWLEDGED_S."""
        self.cuts += 1
        self.struck |= some | others
        self.network.separate(some, others)
        self.timeline.after(UNACKNOWLEDGED_S, self._give_up, some, others)

    def _give_up(self, some: set[int], others: set[int]) -> None:
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
            stream.break_off()
            stream.peer.break_off()

    def close(self) -> None:
        """Frees everything after the run."""
        for host in self.lives:
            host.close()
