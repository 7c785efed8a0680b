"""One host's tables, or engines of some hosts, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.engine_hosts import EngineHost
from tests.support.shm_host import ShmHost

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def host() -> Iterator[ShmHost]:
    made = ShmHost()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[EngineHost, EngineHost]]:
    hosts = EngineHost(1), EngineHost(2)
    yield hosts
    for host in hosts:
        host.engine.stop()


@pytest.fixture
def three() -> Iterator[tuple[EngineHost, EngineHost, EngineHost]]:
    hosts = EngineHost(1), EngineHost(2), EngineHost(3)
    yield hosts
    for host in hosts:
        host.engine.stop()
