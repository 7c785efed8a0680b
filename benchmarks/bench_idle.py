"""The CPU time of an idle cluster."""

from __future__ import annotations

from benchmarks.common import Row, run_script


def bench_idle(benchmark, rounds, record):
    """Processor time of the driver and everything below it; memory that only a worker has."""
    wait = rounds(20, 4)
    found = {}
    benchmark.pedantic(lambda: found.update(run_script("idle.py", str(wait))), rounds=1)
    record(
        Row(
            f"idle cluster over {wait} s, {found['processes']} processes",
            found["cpu_percent"],
            "% CPU",
            wanted=0.5,
            direction="<",
        ),
        Row("idle worker with numpy: USS", found["uss_mb"], "MB", wanted=25, direction="<"),
    )
