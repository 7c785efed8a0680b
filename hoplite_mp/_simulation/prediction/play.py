"""Replays recorded steps on many simulated hosts, with the shipped code and virtual time.

Each worker draws its steps at random from the recording, computes on the cores of its host, and
makes the recorded calls with arrays of the recorded sizes. In synchronous training each host runs a
member of a Group. In asynchronous training the first host runs the actor, and each other host runs
a worker, which waits for the result of each call.
"""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._api.cluster import Cluster
from hoplite_mp._simulation.prediction.cores import Cores
from hoplite_mp._simulation.prediction.links import SharedLinks
from hoplite_mp._simulation.scale.scale import BLOCK_BYTES
from hoplite_mp._simulation.timeline import Timeline
from hoplite_mp._simulation.virtual.clock import virtual_time
from hoplite_mp._simulation.virtual.environment import RunEnvironment, Sizes
from hoplite_mp._simulation.virtual.world import World
from hoplite_mp.config import Config

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hoplite_mp._client.runtime import Runtime
    from hoplite_mp._simulation.prediction.recording import RecordedCall, RecordedTraining
    from hoplite_mp._simulation.virtual.host import VirtualHost

__all__ = ["HOSTS_MIN", "Machines", "NotPlayed", "Prediction", "memory_bytes", "play"]

HOSTS_MIN = 2
EVENTS_MAX = 200_000_000
JOINED_S = 1.0  # time for all hosts to join
POLL_S = 1.0
# Timeout of a run, in virtual time.
SECONDS_MAX = 1e6
# Number of steps that a worker makes before the measured steps, to open connections and to measure
# rates.
WARM_UP_STEPS = 3
# A store has memory for the arrays of this many steps, and at least this many bytes.
STORE_STEPS, STORE_BYTES_MIN = 4, 64 << 20
GATHERING = ("gather", "allgather")
SERVER = "server"


class NotPlayed(RuntimeError):
    """The program of a simulated worker has failed, or does not end."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The hosts. rate: payload bytes per second on each link, in each direction; latency_s: the
    one-way latency; cores_per_host: the cores of each host; cores: the cores that all hosts share,
    or None; byte_s: CPU seconds that a host needs to send, or to receive, one byte."""

    hosts: int
    rate: float
    latency_s: float
    cores_per_host: float
    cores: float | None
    byte_s: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The result for one number of hosts. steps_per_s: in asynchronous training, the steps of all
    workers together; p10, p90: percentiles of the rates of single steps; busy: resource -> the
    share of time in which it was in use; bottleneck: the resource with the largest share."""

    hosts: int
    workers: int
    steps_per_s: float
    p10: float
    p90: float
    busy: dict[str, float]
    bottleneck: str


def memory_bytes(recording: RecordedTraining, hosts: int) -> int:
    """Returns an estimate of the memory that `play` needs, in bytes."""
    gathers = any(call.kind in GATHERING for step in recording.steps for call in step)
    return hosts * STORE_STEPS * recording.bytes_of_step * (hosts if gathers else 1)


def play(recording: RecordedTraining, machines: Machines, steps: int, seed: int) -> Prediction:
    """Replays `steps` measured steps of each worker. Raises NotPlayed if a worker's program
    fails."""
    timeline = Timeline(seed)
    cores = Cores(
        timeline, machines.hosts, machines.cores_per_host, machines.cores, machines.byte_s
    )
    network = SharedLinks(timeline, machines.latency_s, cores)
    config = Config(spin_us_max=0, populate_ahead_bytes=0, memory_reserve_bytes=1 << 20)
    store = max(STORE_BYTES_MIN, STORE_STEPS * recording.bytes_of_step * machines.hosts)
    sizes = Sizes(block=BLOCK_BYTES, store=store)
    environment = RunEnvironment(timeline, network, sizes, config, workers=1)
    world = World(environment)
    run = _Run(world, network, recording, machines, steps, seed)
    try:
        with virtual_time(world.processes):
            for _ in range(machines.hosts):
                world.add_host(machines.rate, machines.rate)
            timeline.run(EVENTS_MAX, JOINED_S)
            run.begin()
            run.wait()
    finally:
        del _runs[run.number]
        world.close()
    return run.prediction()


# Runs by number, for the constructor of the actor.
_runs: dict[int, _Run] = {}


class PlayedServer:
    """The actor of asynchronous training."""

    def __init__(self, number: int) -> None:
        self.run = _runs[number]

    def call(self, kind: str, seconds: float, nbytes: int, _: object) -> Any:
        """Takes the recorded time of a method, and returns a result of the recorded size."""
        self.run.compute(0, seconds)
        self.run.served_s += seconds
        return np.zeros(nbytes, np.uint8)


@dataclass(slots=True)
class _Usage:
    """Resources used up to a point in time."""

    at: float
    cpu_s: list[float]
    sent: list[int]
    received: list[int]
    served_s: float


class _Run:
    """One replay."""

    def __init__(
        self,
        world: World,
        network: SharedLinks,
        recording: RecordedTraining,
        machines: Machines,
        steps: int,
        seed: int,
    ) -> None:
        self.world = world
        self.network = network
        self.cores = network.cores
        self.recording = recording
        self.machines = machines
        self.steps = steps
        self.seed = seed
        self.served_s = 0.0
        self.number = id(self)
        self.ends: list[list[float]] = []  # for each worker: the times at which its steps ended
        self.errors: list[BaseException] = []
        self.first: _Usage | None = None  # when the last worker had warmed up
        self.last: _Usage | None = None  # when the first worker had finished
        # Number of workers that have found the server, and number of workers that have warmed up.
        self._ready = self._warm = 0
        _runs[self.number] = self

    # ---- programs

    def begin(self) -> None:
        hosts: Iterable[VirtualHost] = self.world.hosts
        if self.recording.is_asynchronous:
            first, *hosts = self.world.hosts
            self._program(first, "maker", self._keep_server)
        for rank, host in enumerate(hosts):
            self.ends.append([])
            body = self._train_async if self.recording.is_asynchronous else self._train_sync
            self._program(host, f"worker {rank}", partial(body, rank, host.place))

    def _program(self, host: VirtualHost, name: str, body: Any) -> None:
        def run_program(runtime: Runtime) -> None:
            try:
                body(Cluster._of(runtime))
            except Exception as error:
                self.errors.append(error)

        host.attach(name, run_program)

    def compute(self, host: int, seconds: float) -> None:
        """Makes the running simulated process compute."""
        process = self.world.processes.running
        assert process is not None
        job = object()
        self.cores.compute(host, seconds, self.world.processes.wake_all, job)
        process.wait(job, None)

    def _steps(self, rank: int) -> Iterable[tuple[RecordedCall, ...]]:
        """Yields the steps of a worker, and records when each has ended."""
        rng = random.Random(f"{self.seed} {rank}")
        for number in range(WARM_UP_STEPS + self.steps):
            if number == WARM_UP_STEPS:
                self._warm += 1
                if self._warm == len(self.ends):
                    self.first = self._usage()
            yield rng.choice(self.recording.steps)
            self.ends[rank].append(self.world.timeline.now)
        if self.last is None:
            self.last = self._usage()

    def _train_sync(self, rank: int, place: int, c: Cluster) -> None:
        """A member of the Group of synchronous training."""
        with c.group("training", self.machines.hosts, rank) as g:
            for step in self._steps(rank):
                for call in step:
                    self.compute(place, call.compute_s + call.service_s)
                    if call.kind == "barrier":
                        g.barrier()
                    else:
                        getattr(g, call.kind)(_array(call.bytes_in))

    def _keep_server(self, c: Cluster) -> None:
        server = c.options(name=SERVER, node="h0").actor(PlayedServer, self.number)
        server.call("", 0.0, 0, None).result()
        while len(self.ends[0]) == 0 or self.open_workers:
            time.sleep(POLL_S)

    def _train_async(self, rank: int, place: int, c: Cluster) -> None:
        """A worker of asynchronous training."""
        server = self._find_server(c)
        self._begin_together()
        for step in self._steps(rank):
            for call in step:
                self.compute(place, call.compute_s)
                about = call.kind, call.service_s, call.bytes_out
                server.call(*about, np.zeros(call.bytes_in, np.uint8)).result()

    def _find_server(self, c: Cluster) -> Any:
        while True:
            with contextlib.suppress(LookupError):
                return c.get_actor(SERVER)
            time.sleep(POLL_S)

    def _begin_together(self) -> None:
        """Returns when all workers have found the server."""
        processes = self.world.processes
        assert processes.running is not None
        self._ready += 1
        if self._ready == len(self.ends):
            processes.wake_all(self)
        else:
            processes.running.wait(self, None)

    # ---- the run

    @property
    def open_workers(self) -> list[str]:
        return [
            process.name
            for host in self.world.hosts
            for process in host.programs
            if process.alive and process.name != "maker"
        ]

    def wait(self) -> None:
        """Returns when all workers have finished."""
        timeline, until = self.world.timeline, JOINED_S
        while True:
            until = max(until, timeline.now) + POLL_S
            timeline.run(EVENTS_MAX, until)
            for process in self.world.processes.all:
                if process.failure is not None:
                    raise NotPlayed(f"{process.name}: {process.failure!r}") from process.failure
            if self.errors:
                raise NotPlayed(f"a worker: {self.errors[0]!r}") from self.errors[0]
            if self.ends[0] and not self.open_workers:
                return
            if until > SECONDS_MAX or timeline.events >= EVENTS_MAX:
                raise NotPlayed(f"timed out: {self.open_workers}")

    def _usage(self) -> _Usage:
        self.cores.settle()
        return _Usage(
            self.world.timeline.now,
            list(self.cores.used_s),
            list(self.network.sent),
            list(self.network.received),
            self.served_s,
        )

    # ---- the result

    def prediction(self) -> Prediction:
        assert self.first is not None
        assert self.last is not None
        begin, end = self.first.at, self.last.at
        within = [[at for at in ends if begin <= at <= end] for ends in self.ends]
        if min(map(len, within)) < 2:
            raise NotPlayed("a worker ended before another one had warmed up: play more steps")
        parts = [(len(ends) - 1) / (ends[-1] - ends[0]) for ends in within]
        singles = [1 / (later - earlier) for ends in within for earlier, later in pairwise(ends)]
        workers = len(self.ends)
        together = workers if self.recording.is_asynchronous else 1
        p10, p90 = (together * float(one) for one in np.percentile(singles, (10, 90)))
        busy = self._busy(self.first, self.last)
        bottleneck = max(busy, key=lambda name: round(busy[name], 2))
        steps_per_s = sum(parts) * together / workers
        return Prediction(self.machines.hosts, workers, steps_per_s, p10, p90, busy, bottleneck)

    def _busy(self, first: _Usage, last: _Usage) -> dict[str, float]:
        seconds = last.at - first.at

        def most(earlier: list[Any], later: list[Any]) -> float:
            return float(max(b - a for a, b in zip(earlier, later, strict=True)))

        machines = self.machines
        busy = {}  # among equal shares, the first resource is the bottleneck
        if self.recording.is_asynchronous:
            busy["server"] = (last.served_s - first.served_s) / seconds
        busy |= {
            "link": max(
                most(first.sent, last.sent), most(first.received, last.received)
            ) / machines.rate / seconds,
            "cores of a host": most(first.cpu_s, last.cpu_s) / machines.cores_per_host / seconds,
        }  # fmt: skip
        if machines.cores is not None:
            used = sum(last.cpu_s) - sum(first.cpu_s)
            busy["shared cores"] = used / machines.cores / seconds
        return busy


def _array(nbytes: int) -> np.ndarray[Any, np.dtype[Any]]:
    """Returns an array of this size, with float32 elements if possible, like gradients."""
    if nbytes % 4:
        return np.zeros(nbytes, np.uint8)
    return np.zeros(nbytes // 4, np.float32)
