"""A cluster for the tests of actors, and what must be true after each."""

from collections.abc import Iterator

import psutil
import pytest

import hoplite_mp
from tests.support.waiting import eventually

WORKERS = 2
PROCESSES = WORKERS + 2  # and node and manager


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    with hoplite_mp.Cluster(workers=WORKERS) as made:
        yield made


@pytest.fixture
def c(cluster: hoplite_mp.Cluster) -> Iterator[hoplite_mp.Cluster]:
    """The cluster; afterwards all processes of actors are gone again."""
    yield cluster
    supervisor = psutil.Process(cluster._host.process.pid)  # type: ignore[union-attr]
    eventually(lambda: len(supervisor.children()) <= PROCESSES)
