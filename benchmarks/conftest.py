"""Options and fixtures of the benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks import peers, tasks
from benchmarks.common import WORKERS, Fresh, Memcpy, wake_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import hoplite_mp
    from benchmarks.common import Row
    from benchmarks.peers.base import Peer


def pytest_addoption(parser: pytest.Parser) -> None:
    """--quick, as `python -m benchmarks` hands it on."""
    parser.addoption("--quick", action="store_true", help="few rounds: shows that all still works")


@pytest.fixture(name="rounds", scope="session")
def fixture_rounds(request: pytest.FixtureRequest) -> Callable[[int, int], int]:
    """rounds(usual, quick): how many to do in this run."""
    quick = bool(request.config.getoption("--quick"))
    return lambda usual, less: less if quick else usual


@pytest.fixture(name="peer_pools", scope="module")
def fixture_peer_pools() -> Iterator[list[Peer]]:
    """All installed peers, started; asked for before the cluster, because one of them forks."""
    pools: list[Peer] = []
    try:
        for kind in peers.installed():
            pools.append(kind(WORKERS))
            pools[-1].queue(tasks.report_pid, [0.2] * 2 * WORKERS)  # all workers are up
        yield pools
    finally:
        for pool in pools:
            pool.close()


@pytest.fixture(name="cluster", scope="module")
def fixture_cluster() -> Iterator[hoplite_mp.Cluster]:
    """Ours, started."""
    import hoplite_mp

    with hoplite_mp.Cluster(workers=WORKERS) as cluster:
        wake_all(cluster)
        yield cluster


@pytest.fixture(name="memcpy")
def fixture_memcpy() -> Memcpy:
    """The measure of all large things; sampled by the benchmark between its own rounds."""
    return Memcpy()


@pytest.fixture(name="fresh", scope="session")
def fixture_fresh() -> Fresh:
    """Data that are new in every round."""
    return Fresh()


@pytest.fixture(name="record")
def fixture_record(benchmark, request: pytest.FixtureRequest) -> Callable[..., None]:
    """record(row, ...): lines for the table."""

    def record(*rows: Row) -> None:
        for row in rows:
            row.section = request.node.name
            benchmark.extra_info.setdefault("rows", []).append(row.as_dict())

    return record
