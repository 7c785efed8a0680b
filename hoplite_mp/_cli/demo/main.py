"""The demo from its options to its exit code."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from hoplite_mp._cli.demo import ours, pool
from hoplite_mp._cli.demo.training import Digits, TrainingPlan, load_digits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp._cli.demo.training import TrainingRun

    Train = Callable[[TrainingPlan, Digits, Callable[[int], None]], TrainingRun]
    from typing import Any

    from hoplite_mp._cli.demo.training import TrainingPlan, TrainingRun

# The results that the demo shows at its end: a table, and with --out a JSON file and a picture.


WANTED_ACCURACY = 0.95


def result(plan: TrainingPlan, ours: TrainingRun, pool: TrainingRun) -> dict[str, Any]:
    """The content of result.json: our run, and under "pool" the same keys for the other."""
    return {
        "workers": plan.workers,
        "seed": plan.seed,
        "wanted_accuracy": WANTED_ACCURACY,
        **ours.as_dict(),
        "pool": pool.as_dict(),
    }


def table(ours: TrainingRun, pool: TrainingRun) -> Table:
    """Both runs side by side."""
    runs = ours, pool
    shown = Table(title="Asynchronous training, the first gradients of every step count")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right", ratio=1)
    shown.add_row("test accuracy", *(f"{run.accuracy:.1%}" for run in runs))
    shown.add_row("steps per second", *(f"{run.steps_per_s:.1f}" for run in runs))
    shown.add_row("median step", *(milliseconds(run.median_step) for run in runs))
    shown.add_row("training", *(f"{run.seconds:.1f} s" for run in runs))
    shown.add_row("start-up", *(f"{run.startup_seconds:.1f} s" for run in runs))
    shown.add_row("bytes moved", *(moved(run) for run in runs))
    shown.add_row(
        "time lost at the kill",
        *("-" if run.lost_seconds is None else milliseconds(run.lost_seconds) for run in runs),
    )
    shown.add_row("what happened", *(run.happened for run in runs))
    return shown


def verdict(ours: TrainingRun) -> str | None:
    """None if our run has learnt enough, otherwise a line that says that it has not."""
    if ours.accuracy >= WANTED_ACCURACY:
        return None
    steps = len(ours.step_seconds)
    return (
        f"hoplite-mp demo: the test accuracy is {ours.accuracy:.1%} after "
        f"{steps} step{'s' * (steps != 1)}, less than {WANTED_ACCURACY:.0%}"
    )


def write(directory: Path, plan: TrainingPlan, ours: TrainingRun, pool: TrainingRun) -> None:
    """Writes result.json and accuracy.png into a directory that exists."""
    text = json.dumps(result(plan, ours, pool), indent=2)
    (directory / "result.json").write_text(text + "\n", encoding="utf-8")
    picture(ours, pool).savefig(directory / "accuracy.png", dpi=120)


def picture(ours: TrainingRun, pool: TrainingRun) -> Figure:
    """Accuracy over time of both runs, and when a worker was killed."""
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
    """In milliseconds, with a sensible number of digits."""
    value = seconds * 1e3
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms"


def moved(run: TrainingRun) -> str:
    """Every kind of bytes on a line of its own."""
    kinds = {"copied": "copied once", "made_in_place": "made in place", "pickled": "pickled"}
    return "\n".join(
        f"{size / 1e9:.2f} GB {kinds.get(kind, kind)}" for kind, size in run.bytes_moved.items()
    )


PIPED_WIDTH = 100
"""Columns of the table when the output is not a terminal."""


def demo(plan: TrainingPlan, out: Path | None = None) -> int:
    """Trains twice, and shows the results. Returns the exit code."""
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            print(f"hoplite-mp demo: cannot use --out {out}: {error.strerror}", file=sys.stderr)
            return 1
    console = Console()
    if not console.is_terminal:
        console = Console(width=PIPED_WIDTH)
    try:
        our_run, pool_run = _train_both(plan, console)
        console.print(table(our_run, pool_run))
        if out is not None:
            write(out, plan, our_run, pool_run)
            print(f"written: {out / 'result.json'}, {out / 'accuracy.png'}")
    except KeyboardInterrupt:
        print("hoplite-mp demo: interrupted", file=sys.stderr)
        return 130
    complaint = verdict(our_run)
    if complaint is not None:
        print(complaint, file=sys.stderr)
        return 1
    return 0


def _train_both(plan: TrainingPlan, console: Console) -> tuple[TrainingRun, TrainingRun]:
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
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        bars = [progress.add_task(name, total=plan.steps, start=False) for name, _ in trainings]
        for bar, (_, train) in zip(bars, trainings, strict=True):
            progress.start_task(bar)

            def show(done: int, bar: TaskID = bar) -> None:
                progress.update(bar, completed=done)

            runs.append(train(plan, digits, show))
    return runs[0], runs[1]
