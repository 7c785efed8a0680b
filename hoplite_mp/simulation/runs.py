"""One seed: a cluster, its work, its faults, and the judgement.

Why it exists: a seed is the whole description of a run, so a failing one is a test as it stands.
It must never know: how anything is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hoplite_mp.protocol.messages import HostMeasured, LinkMeasured, NodeLost
from hoplite_mp.simulation.checks import WrongEnd, check_empty, check_quiet
from hoplite_mp.simulation.faults import Faults
from hoplite_mp.simulation.keeping import Nothing, Ranges
from hoplite_mp.simulation.timeline import Timeline
from hoplite_mp.simulation.workload import Workload
from hoplite_mp.simulation.world import World

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from hoplite_mp.simulation.keeping import Keeping

__all__ = ["NODES_MAX", "NODES_MIN", "Outcome", "run_seed"]

NODES_MIN, NODES_MAX = 2, 64
# A run that has so many events, or is so long, goes round in a circle.
EVENTS_MAX = 3_000_000
SECONDS_MAX = 3600.0
# Half of all runs are small: what can go wrong with two hosts goes wrong there, and is short.
SIZES = (2, 3, 3, 4, 4, 5, 6, 8, 8, 12, 16, 24, 40, 64)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. `failure`: what did not hold, or ""."""

    seed: int
    nodes: int
    digest: str
    events: int
    waits: int
    errors: int
    faults: tuple[str, ...]
    commits: int
    failure: str = ""
    tail: tuple[str, ...] = ()


def run_seed(
    seed: int,
    *,
    nodes: int | None = None,
    faults: bool = True,
    prepare: Callable[[World], None] = lambda world: None,
) -> Outcome:
    """Plays it to its end. prepare: what a test does to the world first."""
    timeline = Timeline(seed)
    chance = timeline.chance
    world = _world(timeline)
    prepare(world)
    count = nodes or chance.choice(SIZES)
    _hosts(world, count, chance)
    timeline.run(EVENTS_MAX, 0.05)  # all have joined
    span_s = chance.choice([0.02, 0.2, 1.0])
    work = Workload(world, span_s)
    work.begin()
    trouble = Faults(world, span_s * 1.5)
    if faults:
        trouble.begin()
    failure = ""
    try:
        if not timeline.run(EVENTS_MAX, SECONDS_MAX):
            raise WrongEnd(f"it does not end: {timeline.events} events in {timeline.now:.1f} s")
        _judge(world, work)
    except (AssertionError, KeyError, ValueError) as error:
        failure = f"{type(error).__name__}: {error}"
    waits = world.waits.all
    return Outcome(
        seed,
        count,
        timeline.digest,
        timeline.events,
        len(waits),
        sum(bool(wait.outcome) for wait in waits),
        tuple(trouble.happened),
        world.truth.commits_checked,
        failure,
        tuple(timeline.tail) if failure else (),
    )


def _world(timeline: Timeline) -> World:
    chance = timeline.chance
    keepings: list[Keeping] = [Nothing(), Ranges(), Ranges()]
    latency_s = chance.choice([20e-6, 100e-6, 1e-3, 20e-3])
    return World(
        timeline,
        latency_s=latency_s,
        jitter_s=latency_s * chance.choice([0.0, 0.5, 5.0]),
        keeping=chance.choice(keepings),
    )


def _hosts(world: World, count: int, chance: random.Random) -> None:
    """Equal links, or each its own; told to the planner or not."""
    equal = chance.random() < 0.5
    told = chance.random() < 0.5
    for _ in range(count):
        rate = 125e6 if equal else chance.choice([125e6, 12.5e6, 31e6, 1.25e9])
        node = world.add_host(rate, rate)
        if told:
            node.when_admitted.append(_tell_rate(world, node.host))


def _tell_rate(world: World, host: int) -> Callable[[], None]:
    def tell() -> None:
        node, port = world.hosts[host], world.network.ports[host]
        node.send_manager(HostMeasured(node.number, port.up, port.down))
        for peer in list(node.members)[:3]:
            rate = port.up * world.timeline.chance.choice([1.0, 0.4])
            latency_s = world.network.latency_s
            node.send_manager(LinkMeasured(node.number, peer, latency_s, rate))

    return tell


def _judge(world: World, work: Workload) -> None:
    check_quiet(world)
    for object_id, wait in work.gets:
        if wait.outcome and not world.truth.is_explained(object_id):
            raise WrongEnd(f"{wait}: {wait.outcome}, which nothing explains")
    planner = world.manager.planner
    for member in planner.membership.members:
        planner.step(NodeLost(member.node, member.incarnation), world.timeline.now)
    check_empty(world)
