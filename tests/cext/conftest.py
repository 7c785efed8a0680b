"""One host's tables, or engines of some hosts, in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.cext import engines
from tests.cext.host import Host

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    yield made
    made.close()


@pytest.fixture
def pair() -> Iterator[tuple[engines.Host, engines.Host]]:
    hosts = engines.Host(1), engines.Host(2)
    yield hosts
    for host in hosts:
        host.engine.stop()


@pytest.fixture
def three() -> Iterator[tuple[engines.Host, engines.Host, engines.Host]]:
    hosts = engines.Host(1), engines.Host(2), engines.Host(3)
    yield hosts
    for host in hosts:
        host.engine.stop()
