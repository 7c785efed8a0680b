"""The command `hoplite-mp demo`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hoplite_mp._cli.demo import ours, pool
from hoplite_mp._cli.demo.training import Digits, TrainingPlan, load_digits
from hoplite_mp._cli.table import table

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp._cli.demo.training import TrainingRun

    Train = Callable[[TrainingPlan, Digits, Callable[[int], None]], TrainingRun]
    from typing import Any

    from hoplite_mp._cli.demo.training import TrainingPlan, TrainingRun

# Output of the results: a table, and with --out a JSON file and a plot.


WANTED_ACCURACY = 0.95


def result(plan: TrainingPlan, ours: TrainingRun, pool: TrainingRun) -> dict[str, Any]:
    """The contents of result.json: this library's run and, under "pool", the same keys for the
    pool."""
    return {
        "workers": plan.workers,
        "seed": plan.seed,
        "wanted_accuracy": WANTED_ACCURACY,
        **ours.as_dict(),
        "pool": pool.as_dict(),
    }


def results(ours: TrainingRun, pool: TrainingRun) -> str:
    """A table of both runs."""
    rows: list[tuple[str, Callable[[TrainingRun], str]]] = [
        ("", lambda run: run.name),
        ("test accuracy", lambda run: f"{run.accuracy:.1%}"),
        ("steps per second", lambda run: f"{run.steps_per_s:.1f}"),
        ("median step", lambda run: milliseconds(run.median_step)),
        ("training", lambda run: f"{run.seconds:.1f} s"),
        ("start-up", lambda run: f"{run.startup_seconds:.1f} s"),
        ("bytes moved", moved),
        ("time lost at the kill", lost),
        ("what happened", lambda run: run.happened.replace("; ", "\n")),
    ]
    lines = table(((name, *map(cell, (ours, pool))) for name, cell in rows), right=(1, 2))
    return "\n".join(["Asynchronous training with the first gradients of each step", *lines])


def verdict(ours: TrainingRun) -> str | None:
    """An error line if this library's run has not reached the required accuracy; otherwise
    None."""
    if ours.accuracy >= WANTED_ACCURACY:
        return None
    steps = len(ours.step_seconds)
    return (
        f"hoplite-mp demo: the test accuracy is {ours.accuracy:.1%} after "
        f"{steps} step{'s' * (steps != 1)}, less than {WANTED_ACCURACY:.0%}"
    )


def write(directory: Path, plan: TrainingPlan, ours: TrainingRun, pool: TrainingRun) -> None:
    """Writes result.json and accuracy.png into an existing directory."""
    text = json.dumps(result(plan, ours, pool), indent=2)
    (directory / "result.json").write_text(text + "\n", encoding="utf-8")
    picture(ours, pool).savefig(directory / "accuracy.png", dpi=120)


def picture(ours: TrainingRun, pool: TrainingRun) -> Figure:
    """A plot of both runs' accuracy over time, with the times at which workers were killed."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, colour in (ours, "tab:blue"), (pool, "tab:orange"):
        percent = [100 * value for value in run.accuracies]
        label = f"{run.name}: {run.accuracy:.1%}, {run.steps_per_s:.0f} steps/s"
        axes.plot(run.times, percent, color=colour, marker=".", label=label)
        if run.kill_step is not None:
            killed = sum(run.step_seconds[: run.kill_step])
            axes.axvline(killed, color=colour, linestyle=":", label="a worker is killed")
    axes.axhline(100 * WANTED_ACCURACY, color="grey", linewidth=0.8)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("test accuracy in percent")
    axes.set_ylim(0, 100)
    axes.set_title("Handwritten digits, asynchronous data-parallel training")
    axes.legend(loc="lower right")
    return figure


def milliseconds(seconds: float) -> str:
    """The time in milliseconds, rounded."""
    value = seconds * 1e3
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def moved(run: TrainingRun) -> str:
    """The number of bytes for each kind of transfer, one line for each kind."""
    kinds = {"copied": "copied once", "made_in_place": "made in place", "pickled": "pickled"}
    return "\n".join(
        f"{size / 1e9:.2f} GB {kinds.get(kind, kind)}" for kind, size in run.bytes_moved.items()
    )


def lost(run: TrainingRun) -> str:
    """The time lost by the death of a worker."""
    return "-" if run.lost_seconds is None else milliseconds(run.lost_seconds)


def demo(plan: TrainingPlan, out: Path | None = None) -> int:
    """Trains twice, and prints the results. Returns the exit code."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"hoplite-mp demo: cannot use --out {out}: {error.strerror}", file=sys.stderr)
            return 1
    try:
        our_run, pool_run = _train_both(plan)
        print(results(our_run, pool_run))
        if out is not None:
            write(out, plan, our_run, pool_run)
            print(f"written: {out / 'result.json'}, {out / 'accuracy.png'}")
    except KeyboardInterrupt:
        print("hoplite-mp demo: interrupted", file=sys.stderr)
        return 130
    failure = verdict(our_run)
    if failure is not None:
        print(failure, file=sys.stderr)
        return 1
    return 0


def _train_both(plan: TrainingPlan) -> tuple[TrainingRun, TrainingRun]:
    digits = load_digits(plan.seed)
    trainings: list[tuple[str, Train]] = [(ours.NAME, ours.train), (pool.NAME, pool.train)]
    columns = (
        TextColumn("{task.description:>20}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
    )
    runs = []
    with Progress(*columns, refresh_per_second=4) as progress:
        bars = [progress.add_task(name, total=plan.steps, start=False) for name, _ in trainings]
        for bar, (_, train) in zip(bars, trainings, strict=True):
            progress.start_task(bar)

            def show(done: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done)

            runs.append(train(plan, digits, show))
    return runs[0], runs[1]
