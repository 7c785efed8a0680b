"""The cost per Future of many Futures."""

from __future__ import annotations

from benchmarks.common import Row, run_script

FEW, MANY = 1_000, 100_000
US_WANTED = 10.0
MS_WANTED = 10.0  # of one wait for one of MANY


def bench_many_futures(benchmark, rounds, record):
    """Processor time of the driver for each Future."""
    few, many = {}, {}

    def call():
        few.update(run_script("many_futures.py", str(FEW)))
        many.update(run_script("many_futures.py", str(MANY)))

    benchmark.pedantic(call, rounds=1)
    for name, value in many.items():
        reference = f"with {FEW}"
        if "ms a call" in name:
            record(Row(name, value / 1e3, "s", reference, few[name] / 1e3, wanted=MS_WANTED / 1e3))
            continue
        wanted = None if name.startswith("submit") else US_WANTED / 1e6
        record(Row(name, value / 1e6, "s", reference, few[name] / 1e6, wanted=wanted))
