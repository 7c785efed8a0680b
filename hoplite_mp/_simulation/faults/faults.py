"""The faults of a run, drawn at random.

Hosts die, stop temporarily or permanently, are cut off, become slow, join, rejoin, and leave;
connections between living hosts are reset; workers and programs are killed; the manager dies and is
restarted. Many faults occur during the recovery from another one.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._simulation.faults.message_faults import MESSAGES, MessageFault
from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.virtual.world import World

__all__ = ["Faults"]

# Faults at the first manager's host, in runs with a standby.
FIRST_HOST_KINDS = "die", "die", "stop", "cut", "reset", "manager", "leave", "split", "split"
# Faults at any host. The weight of a kind is the number of its entries.
KINDS = ("die", "die", "die", "stop", "pause", "crawl", "cut", "join", "reset", "kill", "kill",
         "leave", "manager", "manager")  # fmt: skip
KINDS_FOCUSED = 2  # half of all runs draw only from two of these entries
# Most runs have few faults, so that enough of the cluster survives to be checked.
COUNTS = (0, 1, 1, 1, 2, 2, 3, 5)
# Three in ten faults wait for a transfer or a Group call, for at most TRAFFIC_S_MAX, polling every
# TRAFFIC_POLL_S. They occur at most STRIKE_S_MAX later.
TRAFFIC_S_MAX, TRAFFIC_POLL_S, STRIKE_S_MAX = 0.1, 0.0005, 0.004
# Four in ten wait for the n-th message of some kind, for at most MESSAGE_FAULT_S_MAX. They occur at
# this message, or shortly after it.
MESSAGE_FAULT_S_MAX = 2.0
OCCURRENCES = 1, 1, 1, 2, 3, 6
STRIKES = ("die sender", "die sender", "die receiver", "die receiver", "manager", "manager",
           "reset", "cut", "stop receiver", "kill")  # fmt: skip
# A quarter of the faults of these kinds are followed by another fault at one of the next messages,
# most of which belong to the recovery from the first fault.
FOLLOWED_KINDS = "die", "manager", "reset", "stop", "cut"
NEXT_MESSAGES = 1, 2, 3, 5, 8, 13, 20, 30
STRIKE_DELAYS_S = 0.0, 0.0, 0.0, 100e-6, 1e-3, 0.05
HEARTBEAT_TIMEOUT_S = 2.0  # a host that is stopped for longer is declared lost
PERMANENT_STOP_S = HANGS_S + 2.0  # long enough for a wait for the host to count as a hang
# The same, for the hosts of the first manager and of the standby. If both hosts are lost, programs
# wait until an operator powers the stopped host off. Then the standby may be promoted, or the
# programs stop waiting.
FENCED_S = 30.0
DECLARED_LOST_S = 10.0  # the manager has declared a stopped host lost by then
# Added to the duration of a stop in runs with a standby, so that the standby may take over.
STOPS_S = 0.0, 1.0, 4.0, 12.0
RATE_MIN = 250e3  # in bytes per second; slower links look like hangs
CUTS_S = (0.01, 0.5, 3.0, 8.0)


class Faults:
    """The faults of one run."""

    def __init__(self, world: World, span_s: float) -> None:
        """span_s: the period in which faults are scheduled."""
        self.world = world
        self.rng = world.timeline.rng
        self.span_s = span_s
        self.injected: list[str] = []
        self.begun_at = 0.0
        self._kinds: Sequence[str] = KINDS
        self._calls = 0  # number of Group calls begun, at the last check
        self.pending = 0  # scheduled faults, and scheduled ends of faults

    def begin(self) -> None:
        """Schedules the faults."""
        self.begun_at = self.world.timeline.now
        if self.rng.random() < 0.5:  # swarm testing, as in workload.py
            self._kinds = self.rng.sample(KINDS, KINDS_FOCUSED)
        if self.world.environment.standby_at and self.rng.random() < 0.8:
            self._schedule(self.rng.random() * self.span_s, self._strike_first_host)
        at = [self.rng.random() * self.span_s for _ in range(self.rng.choice(COUNTS))]
        if len(at) > 1 and self.rng.random() < 0.5:
            at[1] = at[0] + self.rng.random() * 0.002  # during the recovery from the first fault
        for when in at:
            draw = self.rng.random()
            if draw < 0.3:
                self._schedule(when, self._await_traffic, when + TRAFFIC_S_MAX)
            elif draw < 0.7:
                self._schedule(0.5 * when, self._await_message)
            else:
                self._schedule(when, self._strike_any)

    def _schedule(self, seconds: float, what: object, *arguments: object) -> None:
        self.pending += 1

        def run() -> None:
            self.pending -= 1
            what(*arguments)  # type: ignore[operator]

        self.world.timeline.after(seconds, run)

    def _await_traffic(self, until: float) -> None:
        """Injects a fault as soon as bytes are in flight, or a member of a Group begins a call."""
        world = self.world
        calls, self._calls = self._calls, world.calls_begun
        busy = any(host.engine.is_busy for host in world.hosts if host.alive)
        busy = busy or calls < self._calls
        if busy or world.timeline.now - self.begun_at > until:
            self._schedule(self.rng.random() * STRIKE_S_MAX, self._strike_any)
        else:
            self._schedule(TRAFFIC_POLL_S, self._await_traffic, until)

    def _await_message(self) -> None:
        """Sets a fault for a message of some kind. If no such message is sent in time, another
        fault is injected."""
        rng = self.rng
        arrives, delay = rng.random() < 0.5, rng.choice(STRIKE_DELAYS_S)
        strike = partial(self._strike_after, rng.choice(STRIKES), delay)
        message_fault = MessageFault(rng.choice(MESSAGES), rng.choice(OCCURRENCES), arrives, strike)
        self._set(message_fault)

    def _follow(self) -> None:
        """Sets a message fault for one of the next messages of any kind."""
        rng = self.rng
        strike = partial(self._strike_after, rng.choice(STRIKES), 0.0)
        self._set(MessageFault("", rng.choice(NEXT_MESSAGES), rng.random() < 0.5, strike))

    def _set(self, message_fault: MessageFault) -> None:
        self.world.environment.descriptors.message_faults.append(message_fault)
        self._schedule(MESSAGE_FAULT_S_MAX, self._expire, message_fault)

    def _expire(self, message_fault: MessageFault) -> None:
        message_faults = self.world.environment.descriptors.message_faults
        if message_fault in message_faults:
            message_faults.remove(message_fault)
            self._strike_any()

    def _strike_after(self, strike: str, delay: float, sender: int, receiver: int) -> None:
        if delay:
            self._schedule(delay, self._strike, strike, sender, receiver)
        else:
            self._strike(strike, sender, receiver)

    def _strike(self, strike: str, sender: int, receiver: int) -> None:
        """Injects a fault at the sender or receiver of a message, or between them. Both may be the
        same host."""
        kind, _, target = strike.partition(" ")
        place = sender if target == "sender" else receiver
        if place >= len(self.world.hosts):  # the first message of a host that is being created
            self._schedule(STRIKE_DELAYS_S[3], self._strike, strike, sender, receiver)
            return
        if kind in ("die", "stop") and not (place or self.world.environment.standby_at):
            kind = "manager"  # without a standby, the first host must not be lost
        if kind in ("reset", "cut") and sender == receiver:
            kind = "kill"
        if kind == "reset":
            self.injected.append(kind)
            self.world.reset(sender, receiver)
        elif kind == "cut":
            self.injected.append(kind)
            self.world.cut({sender}, {receiver})
            self._schedule(self.rng.choice(CUTS_S), self.world.heal, {sender}, {receiver})
        else:
            self._inject(kind, place)

    def _strike_any(self) -> None:
        kind = self.rng.choice(self._kinds)
        place = self._random_place()
        if kind not in ("join", "manager", "kill") and place is None:
            return
        self._inject(kind, place or 0)

    def _inject(self, kind: str, place: int) -> None:
        self.injected.append(kind)
        self.world.timeline.note(f"fault: {kind} {place}")
        getattr(self, f"_{kind}")(place)
        if kind in FOLLOWED_KINDS and self.rng.random() < 0.25:
            self._follow()

    def _random_place(self) -> int | None:
        """Draws a machine whose host may be lost. Returns None if there is none."""
        hosts = self.world.hosts if self.world.environment.standby_at else self.world.hosts[1:]
        places = [host.place for host in hosts if host.alive and host.number >= 0]
        return self.rng.choice(places) if places else None

    def _strike_first_host(self) -> None:
        """Injects a fault at the host of the first manager."""
        kind = self.rng.choice(FIRST_HOST_KINDS)
        if kind == "split":  # cut off only from the standby's host
            self.injected.append("cut")
            self.world.cut({0}, {1})
            self._schedule(self.rng.choice(CUTS_S), self.world.heal, {0}, {1})
        elif self.world.hosts[0].alive:
            self._inject(kind, 0)

    def _short_delay(self) -> float:
        return self.rng.choice([0.001, 0.05, 0.5]) * self.rng.random()

    def _die(self, place: int) -> None:
        self.world.end(self.world.hosts[place], "it dies")
        if self.rng.random() < 0.4:
            self._schedule(self._short_delay(), self.world.rejoin, place)

    def _stop(self, place: int) -> None:
        """Stops a host until it is declared lost. Some of these hosts do not resume, and are
        finally powered off."""
        self.world.stop(place)
        if self.rng.random() < 0.15:
            self._schedule(
                DECLARED_LOST_S,
                self._check_declared_lost,
                self.world.hosts[place],
                self.world.stops,
            )
            fenced = place in self.world.environment.managers
            self._schedule(FENCED_S if fenced else PERMANENT_STOP_S, self._switch_off, place)
            return
        extra_s = self.rng.choice(STOPS_S) if self.world.environment.standby_at else 0.0
        self._schedule(
            HEARTBEAT_TIMEOUT_S + extra_s + self._short_delay(), self._resume_host, place
        )

    def _check_declared_lost(self, host: VirtualHost, stops: int) -> None:
        """Checks that the manager has declared the host lost, if no host was stopped since."""
        world = self.world
        manager = world.manager
        if manager is None or world.struck & world.environment.managers or not manager.decides:
            return
        still_stopped = host.alive and host.place in world.network.stopped and world.stops == stops
        if still_stopped and manager.planner.membership.is_living(host.number):
            raise WrongEnd(f"host {host.place} was stopped, but was not declared lost")

    def _switch_off(self, place: int) -> None:
        host = self.world.hosts[place]
        self.world.end(host, "it is powered off")
        self.world.resume(place)

    def _pause(self, place: int) -> None:
        """Stops a host so briefly that it is not declared lost."""
        self.world.stop(place)
        self._schedule(self.rng.random() * 1.2, self.world.resume, place)

    def _resume_host(self, place: int) -> None:
        self.world.resume(place)
        if self.rng.random() < 0.6:
            self._schedule(0.3, self.world.rejoin, place)

    def _crawl(self, place: int) -> None:
        self.world.crawls += 1
        factor = self.rng.choice([0.05, 0.1, 0.3])
        port = self.world.network.ports[place]
        port.up, port.down = max(RATE_MIN, port.up * factor), max(RATE_MIN, port.down * factor)

    def _cut(self, place: int) -> None:
        """Cuts some hosts off from the rest, or two hosts from each other."""
        others = [host.place for host in self.world.hosts if host.place != place]
        some = {place}
        if self.rng.random() < 0.3:
            some.add(self.rng.choice(others))
        others_left = set(others) - some
        if not others_left:
            return
        if self.rng.random() < 0.4:
            others_left = {self.rng.choice(sorted(others_left))}
        self.world.cut(some, others_left)
        self._schedule(self.rng.choice(CUTS_S), self.world.heal, some, others_left)

    def _join(self, place: int) -> None:
        port = self.world.network.ports[0]
        self.world.add_host(port.up, port.down)

    def _reset(self, place: int) -> None:
        others = [host.place for host in self.world.hosts if host.place != place and host.alive]
        if others:
            self.world.reset(place, self.rng.choice(others))

    def _leave(self, place: int) -> None:
        """A node leaves, after transferring objects that other nodes need."""
        self.world.leave(place)

    def _kill(self, place: int) -> None:
        """Kills a worker or a program of some host."""
        self.world.kill_one(self.rng)

    def _manager(self, place: int) -> None:
        downtime_s = self.rng.choice([0.0, 0.02, 0.5])
        if self.world.standby is not None and self.rng.random() < 0.3:
            self.world.kill_standby(downtime_s)
        else:
            self.world.kill_manager(downtime_s)
