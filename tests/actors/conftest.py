"""A cluster for the tests of actors, and what must be true after each."""

import gc
from collections.abc import Iterator

import psutil
import pytest

import hoplite_mp
from tests.support.waiting import eventually

WORKERS = 2
PROCESSES = WORKERS + 2  # and node and manager


@pytest.fixture(scope="module")
def cluster() -> Iterator[hoplite_mp.Cluster]:
    """When the tests of a file are over, all processes of their actors end."""
    with hoplite_mp.Cluster(workers=WORKERS) as made:
        yield made
        supervisor = psutil.Process(made._host.process.pid)  # type: ignore[union-attr]

        def gone() -> bool:
            gc.collect()  # a Future's error holds the frames in which it was raised
            return len(supervisor.children()) <= PROCESSES

        eventually(gone, "the processes of the actors have ended", pause_s=0.05)


@pytest.fixture
def c(cluster: hoplite_mp.Cluster) -> hoplite_mp.Cluster:
    return cluster
