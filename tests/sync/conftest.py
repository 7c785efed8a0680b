"""A cluster for the tests of queues and locks, and what must be true after each."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import psutil
import pytest

import hoplite_mp
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

WORKERS = 2
PROCESSES = WORKERS + 2  # and node and manager


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """When the tests of a file are over, all processes of actors, and stand-ins, end."""
    with hoplite_mp.Cluster(workers=WORKERS, memory="256MiB") as made:
        yield made
        supervisor = psutil.Process(made._host.process.pid)  # type: ignore[union-attr]

        def gone() -> bool:
            gc.collect()  # a Future's error holds the frames in which it was raised
            return len(supervisor.children()) <= PROCESSES

        eventually(gone, "the processes of the actors have ended", pause_s=0.05)


@pytest.fixture
def c(cluster: Cluster) -> Cluster:
    return cluster
