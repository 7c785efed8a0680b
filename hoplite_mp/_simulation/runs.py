"""Runs one seed: a cluster, its workload, its faults, and the checks.

A seed describes a run completely, so a failing seed can be used directly as a test.
"""

from __future__ import annotations

import contextlib
import gc
import random
import traceback
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from hoplite_mp._simulation.faults.faults import Faults
from hoplite_mp._simulation.network import VirtualNetwork
from hoplite_mp._simulation.oracle.oracle import Oracle, WrongEnd, leftovers
from hoplite_mp._simulation.timeline import Timeline
from hoplite_mp._simulation.virtual.clock import virtual_time
from hoplite_mp._simulation.virtual.environment import RunEnvironment, Sizes
from hoplite_mp._simulation.virtual.processes import virtual_locks
from hoplite_mp._simulation.virtual.world import World
from hoplite_mp._simulation.workloads.remote import RESOURCE
from hoplite_mp._simulation.workloads.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


__all__ = ["RunOutcome", "run_seed"]

NODES_MIN, NODES_MAX = 2, 32
# Most runs have few hosts: many bugs need only two, and are found sooner there.
SIZES = (2, 3, 3, 4, 4, 5, 6, 8)
EVENTS_MAX = 3_000_000
JOINED_S = 0.3  # time for all hosts to join
POLL_S = 0.25
# Bytes of a store and of a disk. In a small store values are spilled, and may not fit.
STORES = 256 << 20, 256 << 20, 256 << 20, 6 << 20
DISKS = 1 << 30, 1 << 30, 2 << 20
# Link rates in bytes per second, for runs with equal and with unequal links. On slow links, most
# faults occur during a transfer.
RATES = 125e6, 125e6, 125e6, 20e6, 4e6
UNEQUAL = 125e6, 125e6, 31e6, 62e6, 1.25e9, 4e6
# Share of runs in which some paths are narrower than the sender's link; share of narrow paths in
# these runs; the minimum rate of a sender's link that has narrow paths; and the rates of the paths,
# as fractions of that rate.
NARROW_RUNS, NARROW_PATHS, NARROW_RATE_MIN = 0.3, 0.3, 20e6
NARROW = 0.25, 0.1, 0.05
# Share of those runs in which the manager knows the narrow paths from the start. Few runs transfer
# enough bytes to measure them.
KNOWN_RUNS = 0.7
# Share of runs that have a standby.
STANDBY_RUNS = 0.35
# Share of runs in which processes have collector threads, as in production. Seeds below
# COLLECTED_FROM have none, because tests replay seeds that found bugs without them.
COLLECTED, COLLECTED_FROM = 0.5, 7_000_000
# Seeds from this number on also draw the programs of workloads/learning.py.
LEARNING_FROM = 9_000_000
COLLECT_RUNS = 16  # runs per garbage collection, because one takes milliseconds
SECONDS_MAX = 600.0  # timeout of a run, in virtual time
# Time after the end of the last program until every node has detected every death and has cleaned
# up. A manager that was restarted shortly before still waits for nodes that never return.
SETTLE_S, SETTLES_MAX = 3.0, 15


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """The result of one run. `failure`: the violated invariant, or ""."""

    seed: int
    nodes: int
    digest: str
    events: int
    programs: int
    errors: int
    faults: tuple[str, ...]
    reads: int
    groups: int
    managers: int  # number of managers that have died
    takeovers: int  # number of times that a standby became the manager
    failure: str = ""
    tail: tuple[str, ...] = ()


def run_seed(
    seed: int,
    *,
    nodes: int | None = None,
    faults: bool = True,
    prepare: Callable[[World], None] = lambda world: None,
    begin: Callable[[Workload], None] = Workload.begin,
    store: int | None = None,
    standby: bool | None = None,
    collectors: bool | None = None,
) -> RunOutcome:
    """Runs a seed to its end. For tests: prepare: called with the world first; begin: starts the
    programs; store: bytes of each store; standby: whether there is one; collectors: whether
    processes have collector threads; None: as drawn from the seed."""
    timeline = Timeline(seed)
    rng = timeline.rng
    latency_s = rng.choice([20e-6, 100e-6, 1e-3])
    network = VirtualNetwork(timeline, latency_s, latency_s * rng.choice([0.0, 0.5, 5.0]))
    sizes = Sizes(store=rng.choice(STORES), disk=rng.choice(DISKS))
    if store is not None:
        sizes = replace(sizes, store=store)
    shared = faults and random.Random(f"standby {seed}").random() < STANDBY_RUNS
    if standby is not None:
        shared = standby
    place = 1 if shared else None
    if collectors is None:
        drawn = random.Random(f"collectors {seed}").random() < COLLECTED
        collectors = seed >= COLLECTED_FROM and drawn
    environment = RunEnvironment(
        timeline, network, sizes, standby_place=place, resources=f"{RESOURCE}=2",
        collectors=collectors, learning=seed >= LEARNING_FROM,
    )  # fmt: skip
    world = World(environment)
    prepare(world)
    count = nodes or rng.choice(SIZES)
    oracle = Oracle(world)
    oracle.small_stores = sizes.store < STORES[0]
    failure = ""
    span_s = rng.choice([0.02, 0.2, 1.0])
    work, injector = Workload(world, oracle, span_s), Faults(world, span_s * 1.5)
    locks = virtual_locks(world.processes) if collectors else contextlib.nullcontext()
    with virtual_time(world.processes), locks, _no_collector():
        try:
            rates = _rates(rng, count)
            paths = random.Random(f"paths {seed}")
            _play(world, work, partial(begin, work), injector if faults else None, rates, paths)
        except Exception as error:  # includes errors that would have ended a node's process
            failure = f"{type(error).__name__}: {error}"
            timeline.tail.extend(traceback.format_exc().splitlines())
    world.close()
    return RunOutcome(
        seed,
        count,
        timeline.digest,
        timeline.events,
        work.begun,
        len(oracle.errors),
        tuple(injector.injected),
        oracle.reads,
        work.groups,
        world.managers,
        world.takeovers,
        failure,
        tuple(timeline.tail) if failure else (),
    )


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """Disables automatic garbage collection. Freeing a ref is an event of the run, so it must not
    happen at arbitrary times. Explicit collections do not scan objects older than the run."""
    enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        _runs.append(None)
        if len(_runs) == COLLECT_RUNS:  # each run leaves many reference cycles
            _runs.clear()
            gc.collect()
        if enabled:
            gc.enable()


_runs: list[None] = []


def _rates(rng: random.Random, count: int) -> Iterator[float]:
    are_equal = rng.random() < 0.5
    default_rate = rng.choice(RATES)
    for _ in range(count):
        yield default_rate if are_equal else rng.choice(UNEQUAL)


def _play(
    world: World,
    work: Workload,
    begin: Callable[[], None],
    injector: Faults | None,
    rates: Iterator[float],
    paths: random.Random,
) -> None:
    timeline = world.timeline
    for rate in rates:  # drawn one by one, because creating a host draws from the same generator
        world.add_host(rate, rate)
    narrow = _narrow(world.network, paths)
    timeline.run(EVENTS_MAX, JOINED_S)
    if narrow and paths.random() < KNOWN_RUNS:
        _report_narrow_paths(world, narrow)
    begin()
    if injector is not None:
        injector.begin()
    until, polls = JOINED_S + work.span_s * 1.5, 0
    while True:
        timeline.run(EVENTS_MAX, until)
        polls += 1
        if polls & (polls - 1) == 0:  # at the 1st, 2nd, 4th, 8th, ... poll
            gc.collect()  # at fixed times, because freed refs affect other processes
        _check_processes(world)
        if not (work.open or (injector is not None and injector.pending)):
            break
        until += POLL_S
        if until > SECONDS_MAX or timeline.events >= EVENTS_MAX:
            raise WrongEnd(f"the run does not end: {work.open} after {timeline.events} events")
    work.oracle.check_runs()
    work.oracle.check_members()
    leftover = ""
    for _ in range(SETTLES_MAX):
        until += SETTLE_S
        timeline.run(EVENTS_MAX, until)
        _check_processes(world)
        leftover = leftovers(world) or work.oracle.check_admitted()
        if not leftover:
            work.oracle.check_agreed()  # a host that was cut off has ended by now
            return
        gc.collect()
    raise WrongEnd(leftover)


def _narrow(network: VirtualNetwork, rng: random.Random) -> dict[tuple[int, int], float]:
    """Draws narrow paths. Returns (sender, receiver) -> rate."""
    narrow: dict[tuple[int, int], float] = {}
    if rng.random() >= NARROW_RUNS:
        return narrow
    for sender in network.ports:
        for receiver in network.ports:
            if sender is not receiver and rng.random() < NARROW_PATHS:
                rate = sender.up * rng.choice(NARROW)
                if sender.up >= NARROW_RATE_MIN:
                    narrow[sender.host, receiver.host] = rate
                    network.narrow_path(sender.host, receiver.host, rate)
    return narrow


def _report_narrow_paths(world: World, narrow: dict[tuple[int, int], float]) -> None:
    """Makes receivers report their narrow paths to the manager."""
    for (place, to), rate in narrow.items():
        sender, receiver = world.hosts[place], world.hosts[to]
        cluster_node = receiver.cluster_node
        number = (
            None if cluster_node is None else cluster_node.host.roster.number_of(sender.host_id)
        )
        if number is not None and cluster_node is not None:
            tell = cluster_node.plan_runner.cells.pairs.tell
            receiver.loop.run(partial(tell, number, rate))


def _check_processes(world: World) -> None:
    """Checks that no process has ended with an error."""
    for process in world.processes.all:
        error = process.failure
        if isinstance(error, AssertionError):
            raise error
        if error is not None:
            what = f"{process.name} on host {process.host}"
            raise WrongEnd(f"{what}: {type(error).__name__}: {error}") from error
