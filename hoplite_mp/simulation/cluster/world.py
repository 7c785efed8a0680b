"""Everything of one run together, and what can happen to a host.

Why it exists: hosts, the manager and the network know each other through this. A host that dies
resets its connections; one that is stopped, or cut off, is given up by the real code in its time.
It must never know: what is asked for, which faults come when.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp.protocol.greetings import Introduction
from hoplite_mp.protocol.versions import software_versions
from hoplite_mp.simulation.cluster.host import Host
from hoplite_mp.simulation.cluster.manager import VirtualManager

if TYPE_CHECKING:
    import random

    from hoplite_mp.simulation.cluster.processes import Process
    from hoplite_mp.simulation.cluster.surroundings import Surroundings

__all__ = ["World"]

# When the kernel ends a connection over which nothing was acknowledged (transport/listen.py).
UNACKNOWLEDGED_S = 40.0
HOME_BASE = 1000  # homes are random numbers in a cluster; here they are counted from this on
MANAGER_PLACE = 0
RESTART_S = 0.001  # of a manager, at least: its supervisor forks another one


class World:
    """One cluster. Host 0 has the manager, and never dies."""

    def __init__(self, around: Surroundings) -> None:
        self.around = around
        self.timeline = around.timeline
        self.network = around.network
        self.board = around.board
        self.processes = around.processes
        self.hosts: list[Host] = []  # the latest life on each machine
        self.lives: list[Host] = []
        self.lost: list[Host] = []  # lives that are over
        self.manager: VirtualManager | None = None
        self.managers = 0  # that have died
        self.cuts = self.resets = self.stops = self.killed = 0
        self._introduction = Introduction(HOME_BASE, software_versions())

    # -- beginnings ----------------------------------------------------------------------------

    def _start_manager(self, again: bool) -> VirtualManager:
        around = self.around
        config = around.config
        return VirtualManager(
            self.board,
            MANAGER_PLACE,
            around.manager_at,
            (HOME_BASE, around.cluster, self._introduction),
            beat_s=config.beat_interval_s,
            silence_s=config.silence_s,
            again=again,
        )

    def add_host(self, up: float, down: float) -> Host:
        """One more machine, whose node joins. The first one has the manager."""
        place = self.network.add(up, down)
        self.hosts.append(self._begin(place))
        return self.hosts[-1]

    def _begin(self, place: int) -> Host:
        home = HOME_BASE + len(self.lives)
        near = None
        if place == MANAGER_PLACE:
            self.board.kept_open.add(self.around.manager_at)
            self.manager = self._start_manager(False)
            near = self.manager.near(self.manager.loop)  # its loop becomes the node's
        host = Host(self.around, place, home, self.end, near)
        self.lives.append(host)
        return host

    def rejoin(self, place: int) -> None:
        """A new life on that machine."""
        if not self.hosts[place].alive:
            self.timeline.note(f"host {place} joins again")
            self.go_on(place)
            self.hosts[place] = self._begin(place)

    def host_of(self, process: Process | None) -> Host | None:
        """On which life of a host that process runs."""
        return next((host for host in self.lives if process in host.processes), None)

    # -- ends ----------------------------------------------------------------------------------

    def end(self, host: Host, why: str) -> None:
        """That life is over, and so are its connections: those who have some see it."""
        if not host.alive:
            return
        self.timeline.note(f"host {host.place} ends: {why}")
        host.die()
        self.lost.append(host)
        self._reset_all(host.loop, host.place)

    def _reset_all(self, loop: object, place: int) -> None:
        network = self.network
        for end in self.board.close_all(loop):
            delay = network.delay(place, end.host)
            self.timeline.after(delay, network.pass_on, place, end.host, end.break_off)

    def lose_manager(self, away_s: float) -> None:
        """Its process dies; another one is started after that time."""
        manager = self.manager
        if manager is None:
            return
        self.timeline.note("the manager dies")
        self.managers += 1
        self.manager = None
        manager.loop.over = True
        self._reset_all(manager.loop, MANAGER_PLACE)
        self.timeline.after(max(away_s, RESTART_S), self._manager_again)

    def _manager_again(self) -> None:
        self.timeline.note("another manager is started")
        manager = self.manager = self._start_manager(True)
        node = self.hosts[MANAGER_PLACE]
        stream = manager.near(node.loop)
        node.loop.run_soon(partial(node.node.rooms.management.again, stream))

    def leave(self, place: int) -> None:
        """Its node is asked to."""
        node = self.hosts[place].node
        if node.lan is not None:
            self.hosts[place].loop.run(node.lan.draining.begin)

    def kill_one(self, chance: random.Random) -> None:
        """A worker, or a program, of some host that lives."""
        found = [
            (host, process)
            for host in self.hosts
            if host.alive
            for process in host.processes
            if process.alive
        ]
        if found:
            host, process = chance.choice(found)
            self.timeline.note(f"{process.name} on host {host.place} is killed")
            self.killed += 1
            host.kill(process)

    # -- what is in the way --------------------------------------------------------------------

    def stop(self, place: int) -> None:
        """The machine does nothing."""
        self.stops += 1
        self.network.stop(place)

    def go_on(self, place: int) -> None:
        """It does again."""
        self.network.go_on(place)

    def cut(self, some: set[int], others: set[int]) -> None:
        """Nothing passes between these; their connections end when nothing is acknowledged."""
        self.cuts += 1
        self.network.separate(some, others)
        self.timeline.after(UNACKNOWLEDGED_S, self._give_up, some, others)

    def _give_up(self, some: set[int], others: set[int]) -> None:
        for one in some:
            for other in others:
                if (one, other) in self.network.cut:
                    self.reset(one, other)

    def heal(self, some: set[int], others: set[int]) -> None:
        """It passes again."""
        self.network.join(some, others)

    def reset(self, one: int, other: int) -> None:
        """All connections between two machines break."""
        self.resets += 1
        for stream in self.board.between(one, other):
            stream.out.close()
            stream.peer.out.close()
            stream.break_off()
            stream.peer.break_off()

    def close(self) -> None:
        """The run is over."""
        for host in self.lives:
            host.close()
