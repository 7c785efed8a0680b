"""A cluster for the tests of queues and locks, and what must be true after each."""

from __future__ import annotations

import gc
import time
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
POLL_S = 0.02  # each look takes milliseconds of a processor, and an actor about a second to go


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=WORKERS, memory="256MiB") as made:
        yield made


@pytest.fixture
def c(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster; afterwards all processes of actors, and stand-ins, are gone again."""
    yield cluster
    supervisor = psutil.Process(cluster._host.process.pid)  # type: ignore[union-attr]

    def gone() -> bool:
        gc.collect()  # a Future's error holds the frames in which it was raised, and they hold it
        if len(supervisor.children()) <= PROCESSES:
            return True
        time.sleep(POLL_S)
        return False

    eventually(gone)
