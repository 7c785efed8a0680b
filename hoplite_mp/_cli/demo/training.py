"""The common part of both runs of the demo: network, data, optimiser, settings and results.

The network has two layers (64 -> hidden -> 10, ReLU, softmax). All its parameters are in one flat
float32 array, so that sharing them and summing gradients are operations on a single array.
"""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]
    Labels = NDArray[np.int64]

PIXELS = 64
CLASSES = 10
HIDDEN = 14_000
"""Hidden units: (64 + 1 + 10) * 14 000 + 10 parameters are 4.2 MB."""

KILL_WINDOW = 10
"""Number of steps after the kill, the longest of which shows how much time was lost."""


ROSTER_SECONDS = 20.0
"""How long to wait for the pids of all workers."""


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The settings of the training, which are the same for both runs."""

    workers: int = 4
    steps: int = 320
    kill: bool = True
    hidden: int = HIDDEN
    batch: int = 32
    rate: float = 2e-4
    momentum: float = 0.9
    seed: int = 2024
    snapshots: int = 25

    @property
    def taken(self) -> int:
        """The number of gradients for which a step waits."""
        return min(2, self.workers)

    @property
    def kill_step(self) -> int | None:
        """The step before which a worker is killed."""
        return self.steps // 2 if self.kill else None

    def wants_snapshot(self, done: int) -> bool:
        """Whether the parameters after `done` steps are recorded for the accuracy curve."""
        return done == self.steps or done % max(1, self.steps // self.snapshots) == 0


class Digits(NamedTuple):
    """scikit-learn's handwritten digits, four fifths of which are used for training."""

    train_x: Floats
    train_y: Labels
    test_x: Floats
    test_y: Labels


class Layers(NamedTuple):
    """The parts of the flat parameter array, as views."""

    w1: Floats
    b1: Floats
    w2: Floats
    b2: Floats


@dataclasses.dataclass
class TrainingRun:
    """The results of one run of the training."""

    name: str
    seconds: float
    """The duration of the training, including the kill."""
    startup_seconds: float
    step_seconds: list[float]
    times: list[float]
    """Seconds from the start, one for each snapshot."""
    accuracies: list[float]
    contributors: list[int]
    """For each slot (a task in flight), the number of steps that used its gradient."""
    staleness: list[int]
    """For each applied gradient, the age of its parameters in steps."""
    bytes_moved: dict[str, int]
    kill_step: int | None = None
    killed_pid: int | None = None
    happened: str = "no worker was killed"
    lost_tasks: int = 0

    @property
    def accuracy(self) -> float:
        """The accuracy on the test set at the end."""
        return self.accuracies[-1]

    @property
    def steps_per_s(self) -> float:
        """The mean number of steps per second over the whole training."""
        return len(self.step_seconds) / self.seconds

    @property
    def median_step(self) -> float:
        """The median of the steps' durations, in seconds."""
        return float(np.median(self.step_seconds))

    @property
    def lost_seconds(self) -> float | None:
        """The longest step after the kill minus the median step; None without a kill."""
        if self.kill_step is None:
            return None
        around = self.step_seconds[self.kill_step : self.kill_step + KILL_WINDOW]
        return max(0.0, max(around) - self.median_step)

    def as_dict(self) -> dict[str, Any]:
        """The results as written to result.json."""
        return {
            "accuracy": self.accuracy,
            "killed_pid": self.killed_pid,
            "steps_per_s": self.steps_per_s,
            "seconds": self.seconds,
            "startup_seconds": self.startup_seconds,
            "steps": len(self.step_seconds),
            "median_step_seconds": self.median_step,
            "kill_step": self.kill_step,
            "lost_seconds": self.lost_seconds,
            "lost_tasks": self.lost_tasks,
            "happened": self.happened,
            "contributors": self.contributors,
            "staleness_mean": float(np.mean(self.staleness)),
            "staleness_max": max(self.staleness),
            "bytes_moved": self.bytes_moved,
            "curve": {"seconds": self.times, "accuracy": self.accuracies},
        }


def load_digits(seed: int) -> Digits:
    """scikit-learn's data set, shuffled, with centred and scaled pixels."""
    from sklearn import datasets

    x, y = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(x))
    x = ((x[order] - 5) / 6).astype(np.float32)
    y = y[order].astype(np.int64)
    cut = len(x) * 4 // 5
    return Digits(x[:cut], y[:cut], x[cut:], y[cut:])


def parameter_count(hidden: int) -> int:
    """The number of elements in the flat array."""
    return (PIXELS + 1 + CLASSES) * hidden + CLASSES


def layers(flat: Floats) -> Layers:
    """The four parts of a flat array (parameters or gradient), as views of it."""
    hidden = (flat.size - CLASSES) // (PIXELS + 1 + CLASSES)
    ends = np.cumsum([PIXELS * hidden, hidden, hidden * CLASSES])
    w1, b1, w2, b2 = np.split(flat, ends)
    return Layers(w1.reshape(PIXELS, hidden), b1, w2.reshape(hidden, CLASSES), b2)


def start_parameters(plan: TrainingPlan) -> Floats:
    """He initialisation for the first layer, zero biases, small values in the second layer."""
    rng = np.random.default_rng(plan.seed)
    flat = np.zeros(parameter_count(plan.hidden), np.float32)
    net = layers(flat)
    net.w1[...] = rng.standard_normal(net.w1.shape, np.float32) * np.sqrt(2 / PIXELS)
    net.w2[...] = rng.standard_normal(net.w2.shape, np.float32) * np.sqrt(1 / plan.hidden)
    return flat


def minibatch(plan: TrainingPlan, number: int, x: Floats, y: Labels) -> tuple[Floats, Labels]:
    """The examples for gradient task `number`, which are the same in every process."""
    rows = np.random.default_rng([plan.seed, number]).integers(0, len(x), plan.batch)
    return x[rows], y[rows]


def loss_and_gradient(params: Floats, x: Floats, y: Labels, out: Floats) -> float:
    """Returns the mean cross-entropy of a minibatch, and writes its gradient into `out`."""
    net, grad = layers(params), layers(out)
    hidden = x @ net.w1
    hidden += net.b1
    np.maximum(hidden, 0, out=hidden)
    logits = hidden @ net.w2 + net.b2
    logits -= logits.max(axis=1, keepdims=True)
    probabilities = np.exp(logits)
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(np.maximum(probabilities[rows, y], np.finfo(np.float32).tiny)).mean()

    error = probabilities
    error[rows, y] -= 1
    error /= len(x)
    np.matmul(hidden.T, error, out=grad.w2)
    np.sum(error, axis=0, out=grad.b2)
    back = error @ net.w2.T
    back *= hidden > 0
    np.matmul(x.T, back, out=grad.w1)
    np.sum(back, axis=0, out=grad.b1)
    return float(loss)


def accuracy(params: Floats, x: Floats, y: Labels) -> float:
    """The share of correctly recognised examples."""
    net = layers(params)
    logits = np.maximum(x @ net.w1 + net.b1, 0) @ net.w2 + net.b2
    return float((logits.argmax(axis=1) == y).mean())


class Momentum:
    """Stochastic gradient descent with momentum, in place."""

    def __init__(self, params: Floats, rate: float, momentum: float) -> None:
        self.params = params
        self._rate = np.float32(rate)
        self._momentum = np.float32(momentum)
        self._velocity = np.zeros_like(params)

    def apply(self, gradient: Floats) -> None:
        """Makes one step with this gradient."""
        self._velocity *= self._momentum
        self._velocity += gradient
        self.params -= self._rate * self._velocity


class Record:
    """The measurements of a run. Snapshots are evaluated after the clock has stopped."""

    def __init__(self, plan: TrainingPlan, digits: Digits) -> None:
        self._plan = plan
        self._digits = digits
        self._snapshots: list[Floats] = []
        self._start = self._last = 0.0
        self.times: list[float] = []
        self.step_seconds: list[float] = []
        self.contributors = [0] * plan.workers
        self.staleness: list[int] = []

    def start(self, params: Floats) -> None:
        """Starts the clock."""
        self._snapshots.append(params.copy())
        self.times.append(0.0)
        self._start = self._last = time.perf_counter()

    def step(self, params: Floats, slots: Sequence[int], ages: Sequence[int]) -> None:
        """Records a step with the gradients in `slots`, whose parameters are `ages` steps old."""
        for slot in slots:
            self.contributors[slot] += 1
        self.staleness.extend(ages)
        now = time.perf_counter()
        self.step_seconds.append(now - self._last)
        self._last = now
        if self._plan.wants_snapshot(len(self.step_seconds)):
            self._snapshots.append(params.copy())
            self.times.append(now - self._start)

    def finish(self, name: str, startup_seconds: float, bytes_moved: dict[str, int]) -> TrainingRun:
        """Evaluates the snapshots. The clock has already stopped, at the last step."""
        test_x, test_y = self._digits.test_x, self._digits.test_y
        return TrainingRun(
            name=name,
            seconds=self._last - self._start,
            startup_seconds=startup_seconds,
            step_seconds=self.step_seconds,
            times=self.times,
            accuracies=[accuracy(params, test_x, test_y) for params in self._snapshots],
            contributors=self.contributors,
            staleness=self.staleness,
            bytes_moved=bytes_moved,
        )


def report_pid(pause: float) -> int:
    """A task that returns its worker's pid, after a pause in which the other workers begin other
    tasks."""
    time.sleep(pause)
    return os.getpid()


def roster(run_tasks: Callable[[float, int], Iterable[int]], workers: int) -> list[int]:
    """The pids of all workers. `run_tasks(pause, count)` runs `report_pid` in `count` tasks."""
    pids: set[int] = set()
    deadline = time.monotonic() + ROSTER_SECONDS
    while len(pids) < workers and time.monotonic() < deadline:
        pids.update(run_tasks(0.02, 2 * workers))
    return sorted(pids)
