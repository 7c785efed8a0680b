"""The time until a program can start, and until a cluster has returned its first results."""

from __future__ import annotations

from benchmarks.common import beside, median, run_script


def bench_startup(benchmark, rounds, record):
    """Fresh interpreters; from making the cluster to the second result, imports not counted."""
    ours, theirs = [], []

    def both():
        theirs.append(run_script("startup_pool.py")["seconds"])
        ours.append(run_script("startup_ours.py")["seconds"])

    benchmark.pedantic(both, rounds=rounds(7, 2), warmup_rounds=1)
    row = beside(
        "Cluster(workers=2) to its first two results",
        median(ours[1:]),
        "s",
        "ProcessPoolExecutor(spawn)",
        median(theirs[1:]),
    )
    row.wanted = 1.3
    record(row)


def bench_import(benchmark, rounds, record):
    """Fresh interpreters; what an import adds to one that has imported nothing. The names of the
    package are imported at their first use, so that counts, too."""
    ours, used, theirs = [], [], []

    def all_three():
        theirs.append(run_script("imported.py", "numpy")["seconds"])
        ours.append(run_script("imported.py", "hoplite_mp")["seconds"])
        used.append(run_script("imported.py", "hoplite_mp", "Cluster")["seconds"])

    benchmark.pedantic(all_three, rounds=rounds(15, 2), warmup_rounds=1)
    numpy = "import numpy", median(theirs[1:])
    row = beside("import hoplite_mp", median(ours[1:]), "s", *numpy)
    row.wanted = 1.5
    record(row)
    title = "import hoplite_mp and first use of Cluster, numpy with it"
    record(beside(title, median(used[1:]), "s", *numpy))
