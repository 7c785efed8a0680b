"""joblib's Parallel on workers of this library compared with those of loky.

Both backends make the same calls in turn, with two workers each. The tasks compute nothing, so the
times are those of sending, receiving and waiting."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from benchmarks.common import WORKERS, Row, median, run_script, seconds

joblib = pytest.importorskip("joblib")
BACKENDS = ("hoplite_mp", "loky")


@pytest.fixture(name="parallel", scope="module")
def fixture_parallel():
    """parallel(backend): a new Parallel; the workers of both are up, and are kept."""
    import hoplite_mp.integrations.joblib as ours

    def parallel(backend):
        return joblib.Parallel(n_jobs=WORKERS, backend=backend)

    for backend in BACKENDS:
        parallel(backend)(joblib.delayed(first)(np.ones(1), 0) for _ in range(20))
    yield parallel
    ours.shutdown()
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)


def first(array, number):
    """Touches one element."""
    return float(array.flat[0]) + number


def made(number):
    """A result of 16 MB."""
    return np.full(16_000_000 // 8, float(number))


def triple(number):
    """A tiny task."""
    return 3 * number


def in_turns(benchmark, rounds, call, before=lambda backend: None, warm_up=1):
    """{backend: seconds of call(backend, before(backend)), one for each round}."""
    times = {backend: [] for backend in BACKENDS}

    def both():
        for backend in BACKENDS:
            given = before(backend)
            times[backend].append(seconds(lambda: call(backend, given)))  # noqa: B023

    benchmark.pedantic(both, rounds=rounds, warmup_rounds=warm_up)
    return {backend: values[warm_up:] for backend, values in times.items()}


def row(title, times, wanted):
    """Ours beside loky's."""
    ours, loky = (median(times[backend]) for backend in BACKENDS)
    return Row(title, ours, "s", "loky", loky, ours / loky, wanted)


def bench_new_argument(benchmark, parallel, rounds, record):
    """A new array of 256 MB, read by 8 tasks."""
    numbers = itertools.count()

    def call(backend, array):
        found = parallel(backend)(joblib.delayed(first)(array, i) for i in range(8))
        assert found == [array[0] + i for i in range(8)]

    def fresh(backend):
        return np.full(256_000_000 // 8, float(next(numbers)))

    times = in_turns(benchmark, rounds(7, 2), call, fresh)
    record(row("a new argument of 256 MB in 8 tasks", times, 1.0))


def bench_same_argument(benchmark, parallel, rounds, record):
    """The same array again, while a `with Parallel()` block is open."""
    array = np.full(256_000_000 // 8, 7.0)
    opened = {backend: parallel(backend) for backend in BACKENDS}

    def call(backend, _):
        found = opened[backend](joblib.delayed(first)(array, i) for i in range(8))
        assert found == [7.0 + i for i in range(8)]

    with opened["hoplite_mp"], opened["loky"]:
        times = in_turns(benchmark, rounds(15, 2), call)
    record(row("the same argument of 256 MB again, in an open Parallel, 8 tasks", times, 1.0))


def bench_middle_argument(benchmark, parallel, rounds, record):
    """An array of 16 MB in 40 tasks, and 40 arrays of 16 MB in one each."""
    array = np.full(16_000_000 // 8, 7.0)

    def call(backend, _):
        found = parallel(backend)(joblib.delayed(first)(array, i) for i in range(40))
        assert found == [7.0 + i for i in range(40)]

    times = in_turns(benchmark, rounds(9, 2), call)
    record(row("an argument of 16 MB in 40 tasks", times, 1.0))


def bench_many_arguments(benchmark, parallel, rounds, record):
    """Each task has an array of its own."""
    arrays = [np.full(16_000_000 // 8, float(i)) for i in range(40)]

    def call(backend, _):
        found = parallel(backend)(joblib.delayed(first)(array, 0) for array in arrays)
        assert found == list(map(float, range(40)))

    times = in_turns(benchmark, rounds(5, 2), call)
    record(row("40 arguments of 16 MB, one in each task", times, 1.0))


def bench_results(benchmark, parallel, rounds, record):
    """12 results of 16 MB; they are the caller's own, writable."""

    def call(backend, _):
        found = parallel(backend)(joblib.delayed(made)(i) for i in range(12))
        assert [array[-1] for array in found] == list(map(float, range(12)))
        assert found[0].flags.writeable

    times = in_turns(benchmark, rounds(7, 2), call)
    record(row("12 results of 16 MB", times, 0.25))


def bench_tiny_tasks(benchmark, parallel, rounds, record):
    """2 000 of them."""

    def call(backend, _):
        found = parallel(backend)(joblib.delayed(triple)(i) for i in range(2000))
        assert found == list(range(0, 6000, 3))

    times = in_turns(benchmark, rounds(15, 3), call)
    record(row("2 000 tiny tasks", times, 0.8))


def bench_grid_search(benchmark, rounds, record):
    """GridSearchCV over an SVC on the digits of scikit-learn, 27 fits; each run a new process."""
    pytest.importorskip("sklearn")
    count = rounds(3, 1)
    found = {backend: [] for backend in BACKENDS}

    def both():
        for backend in BACKENDS:
            found[backend].append(run_script("joblib_search.py", backend, str(rounds(3, 1))))

    benchmark.pedantic(both, rounds=count)
    assert len({one["best"] for runs in found.values() for one in runs}) == 1
    cold = {backend: [run["cold"] for run in runs] for backend, runs in found.items()}
    warm = {backend: [s for run in runs for s in run["warm"]] for backend, runs in found.items()}
    record(row("GridSearchCV on digits, workers started for it", cold, 0.9))
    record(row("GridSearchCV on digits, workers there", warm, 1.0))
