"""The training with hoplite_mp: each step puts the parameters once, and copies no gradient."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np

import hoplite_mp
from hoplite_mp._cli.demo.training import (
    Digits,
    Momentum,
    Record,
    TrainingPlan,
    TrainingRun,
    loss_and_gradient,
    minibatch,
    report_pid,
    roster,
    start_parameters,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from hoplite_mp._cli.demo.training import Floats, Labels

NAME = "hoplite_mp"


def gradient(params: Floats, plan: TrainingPlan, number: int, x: Floats, y: Labels) -> Floats:
    """The task: writes the gradient into the store, and returns it without a copy."""
    out: Floats = hoplite_mp.current().empty(params.shape, np.float32)
    loss_and_gradient(params, *minibatch(plan, number, x, y), out)
    return out


def train(plan: TrainingPlan, digits: Digits, progress: Callable[[int], None]) -> TrainingRun:
    """Starts a cluster, trains on it, and kills one of its workers halfway."""
    params = start_parameters(plan)
    optimiser = Momentum(params, plan.rate, plan.momentum)
    record = Record(plan, digits)
    began = time.perf_counter()
    with hoplite_mp.Cluster(workers=plan.workers) as cluster:
        pids = roster(
            lambda pause, count: cluster.map(report_pid, [pause] * count, chunksize=1),
            plan.workers,
        )
        startup_seconds = time.perf_counter() - began
        x, y = cluster.put(digits.train_x), cluster.put(digits.train_y)

        record.start(params)
        shared = cluster.put(params)
        in_flight = [
            cluster.submit(gradient, shared, plan, slot, x, y) for slot in range(plan.workers)
        ]
        submitted = plan.workers
        born = [0] * plan.workers  # slot -> the step in which its parameters were sent
        killed_pid = None
        for step in range(plan.steps):
            if step == plan.kill_step:
                killed_pid = pids[0]
                os.kill(killed_pid, signal.SIGKILL)
            mean = cluster.reduce(in_flight, op="mean", num=plan.taken)
            optimiser.apply(cluster.get(mean))
            first = mean.contributors
            assert first is not None  # the result is ready
            shared = cluster.put(params)
            for slot in first:
                in_flight[slot] = cluster.submit(gradient, shared, plan, submitted, x, y)
                submitted += 1
            record.step(params, first, [step - born[slot] for slot in first])
            for slot in first:
                born[slot] = step + 1
            progress(step + 1)
        stats = cluster.stats()

    size = params.nbytes
    run = record.finish(
        NAME,
        startup_seconds,
        {
            # put() copies parameters and examples; gradients and means are computed in place
            "copied": size * (plan.steps + 1) + digits.train_x.nbytes + digits.train_y.nbytes,
            "made_in_place": size * (submitted - plan.workers + plan.steps),
        },
    )
    run.killed_pid = killed_pid
    if killed_pid is not None:
        run.kill_step = plan.kill_step
        run.happened = _what_happened(stats)
    return run


def _what_happened(stats: dict[str, Any]) -> str:
    total = stats.get("total", stats)
    lost, retried = total["workers_lost"], total["tasks_retried"]
    return f"{lost} worker replaced, {retried} task retried, the others continued"
