"""Actors in a run. Each has a ledger, to which programs on several hosts add entries.

An actor guarantees order and at-most-once execution: a ledger has each entry at most once, the
entries of each caller in order, and each confirmed entry at its confirmed index. With checkpoints,
the ledger survives the death of the actor's process and host. With restarts only, it restarts
empty. With neither, all calls fail after a death.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from hoplite_mp._simulation.oracle.oracle import WrongEnd
from hoplite_mp._simulation.workloads.programs import HANGS_S

if TYPE_CHECKING:
    from hoplite_mp._api.cluster import Cluster
    from hoplite_mp._simulation.virtual.host import VirtualHost
    from hoplite_mp._simulation.workloads.programs import Programs

__all__ = ["begin_actor"]

CALLERS_MAX, CALLS_MAX = 3, 8
# Restarts of each kind of actor, and retries of each call.
RESTARTS = {"mortal": 0, "restarts": 4, "checkpoints": 8}
WINDOW = 3  # calls of one caller in progress at a time

Entry = tuple[int, int]  # (caller, number)

# Salt of a ledger -> pid of the actor's process at the last call.
ledger_pids: dict[int, int] = {}


class LedgerActor:
    """The actor's object."""

    def __init__(self, salt: int) -> None:
        self.salt = salt
        self.entries: list[Entry] = []
        ledger_pids[salt] = os.getpid()

    def add(self, entry: Entry, seconds: float) -> int:
        """Adds an entry; returns its index."""
        ledger_pids[self.salt] = os.getpid()
        time.sleep(seconds)
        self.entries.append(entry)
        return len(self.entries) - 1

    def all(self) -> list[Entry]:
        """Returns all entries."""
        return self.entries


@dataclass
class Story:
    """One ledger, and the entries that it has confirmed."""

    name: str
    salt: int
    kind: str
    maker: VirtualHost
    callers: int
    confirmed: dict[Entry, int] = field(default_factory=dict)  # entry -> its index


def begin_actor(work: Programs) -> None:
    """Starts a program that creates a ledger, and others that find it by its name and add
    entries."""
    hosts, rng = work.hosts(), work.rng
    if not hosts:
        return
    salt = work.salt()
    ledger_pids.pop(salt, None)  # left from an earlier run
    kind = rng.choice(["mortal", "restarts", "checkpoints", "checkpoints"])
    maker = rng.choice(hosts)
    story = Story(f"actor {salt}", salt, kind, maker, rng.randint(1, CALLERS_MAX))
    actor_host = rng.choice([None, None, rng.choice(hosts)])
    holds = partial(_survives, work, story)
    work.program(maker, story.name, partial(_make, work, story, actor_host), holds=holds)
    for caller in range(story.callers):
        seconds = [
            rng.choice([0.0, 0.001, 0.02]) * rng.random() for _ in range(rng.randint(1, CALLS_MAX))
        ]
        body = partial(_write, work, story, caller, seconds)
        work.program(rng.choice(hosts), f"caller {caller} of {story.name}", body, holds=holds)
    for _ in range(rng.choice([0, 0, 1, 2])):
        work.world.timeline.after(rng.random() * work.span_s, _kill, work, story)


def _survives(work: Programs, story: Story) -> bool:
    """Whether all calls of the actor must succeed, after the faults so far."""
    world = work.world
    disturbed = (
        world.cuts or world.resets or world.stops or world.managers or work.oracle.small_stores
    )
    if disturbed or world.leaving:  # an actor on a leaving node accepts no calls
        return False
    if story.kind != "checkpoints" or story.maker in world.lost:
        return False
    return len(world.lost) <= 1 and world.killed <= 2


def _kill(work: Programs, story: Story) -> None:
    """Kills the actor's process, not its host."""
    pid = ledger_pids.get(story.salt)
    for host in work.world.hosts:
        for process in host.processes:
            if process.pid == pid and process.alive and host.alive:
                work.world.kill(host, process)


def _make(work: Programs, story: Story, actor_host: VirtualHost | None, c: Cluster) -> None:
    options: dict[str, Any] = {"name": story.name, "restarts": RESTARTS[story.kind]}
    if story.kind == "checkpoints":
        options |= {"checkpoint": 1, "retries": RESTARTS[story.kind]}
    if actor_host is not None and story.kind == "mortal":
        options["node"] = f"h{actor_host.number}"
        work.await_nodes(story.maker, [options["node"]])
    try:
        ledger = c.options(**options).actor(LedgerActor, story.salt)
        ledger.all().result(timeout=HANGS_S)
        work.board.publish(story.name, b"it is there")
        for caller in range(story.callers):
            work.board.find(f"{story.name} was written by {caller}")
        _check(work, story, ledger.all().result(timeout=HANGS_S))
    except TimeoutError as error:
        raise WrongEnd(f"{story.name} hangs") from error
    finally:
        work.board.publish(story.name, None)


def _write(work: Programs, story: Story, caller: int, seconds: list[float], c: Cluster) -> None:
    done = f"{story.name} was written by {caller}"
    try:
        if work.board.find(story.name) is None:
            return
        try:
            ledger = c.get_actor(story.name)
        except LookupError:
            return  # the actor has ended with the program that created it
        calls: list[Any] = []
        for number, each in enumerate(seconds):
            calls.append(ledger.add((caller, number), each))
            if number >= WINDOW:
                _confirm(story, (caller, number - WINDOW), calls)
        for number in range(max(0, len(calls) - WINDOW), len(calls)):
            _confirm(story, (caller, number), calls)
    finally:
        work.board.publish(done, None)


def _confirm(story: Story, entry: Entry, calls: list[Any]) -> None:
    try:
        story.confirmed[entry] = calls[entry[1]].result(timeout=HANGS_S)
    except TimeoutError as error:
        raise WrongEnd(f"a call of {story.name} hangs") from error


def _check(work: Programs, story: Story, entries: list[Entry]) -> None:
    """Checks the ledger at the end."""
    work.oracle.reads += 1
    state = f"{story.name} ({story.kind}) has {entries}, confirmed: {story.confirmed}"
    if len(set(entries)) != len(entries):
        raise WrongEnd(f"{state}: duplicate entries")
    for caller in range(story.callers):
        numbers = [number for one, number in entries if one == caller]
        if numbers != sorted(numbers):
            raise WrongEnd(f"{state}: wrong order")
    if story.kind == "restarts":  # it may have restarted empty
        return
    if work.world.overruled:  # its state may be older than the loss of its host
        return
    for entry, place in story.confirmed.items():
        if place >= len(entries) or entries[place] != entry:
            raise WrongEnd(f"{state}: {entry} is not at its index")
