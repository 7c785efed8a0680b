"""The cost for the manager of a storm of callers, and of many idle hosts."""

from __future__ import annotations

from benchmarks.common import Row, run_script

CALLERS = 256
LINKS = 1000


def bench_storm(benchmark, rounds, record):
    """256 TLS callers at the same moment; the callers share this host's processors."""
    found = []

    def storm() -> None:
        found.append(run_script("manager_load.py", "storm", str(CALLERS), "0"))

    benchmark.pedantic(storm, rounds=rounds(3, 1))
    slowest = max(found, key=lambda one: one["seconds"])
    assert all(one["connected"] == CALLERS for one in found)
    title = f"{CALLERS} TLS callers at once, the slowest round"
    record(
        Row(f"{title}: all connected", slowest["seconds"], "s", wanted=6.0),
        Row(f"{title}: calls that were dropped", slowest["dropped"], "", wanted=0),
    )


def bench_idle_manager(benchmark, rounds, record):
    """Heartbeats alone, in both directions, with and without TLS."""
    seconds = str(rounds(10, 2))
    for transport in ("tls", "plain"):
        found = run_script("manager_load.py", "idle", str(LINKS), seconds, transport)
        title = f"idle manager with {LINKS} links, {transport}"
        record(Row(title, found["cpu_percent"], "% CPU", wanted=16))
    benchmark.pedantic(lambda: None, rounds=1)
