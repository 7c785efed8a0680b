"""The demo from its options to its exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from hoplite_mp._cli.demo import ours, pool, report
from hoplite_mp._cli.demo.training import Digits, TrainingPlan, load_digits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from hoplite_mp._cli.demo.training import TrainingRun

    Train = Callable[[TrainingPlan, Digits, Callable[[int], None]], TrainingRun]

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
        console.print(report.table(our_run, pool_run))
        if out is not None:
            report.write(out, plan, our_run, pool_run)
            print(f"written: {out / 'result.json'}, {out / 'accuracy.png'}")
    except KeyboardInterrupt:
        print("hoplite-mp demo: interrupted", file=sys.stderr)
        return 130
    complaint = report.verdict(our_run)
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
