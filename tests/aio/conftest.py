"""Each test in asyncio's own event loop and in uvloop's, and one cluster for a file."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import pytest

import hoplite_mp
from hoplite_mp import Cluster
from tests.support.waiting import PATIENCE_S, Run

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=2, memory="256MiB") as made:
        yield made


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[Run]:
    """Runs a coroutine in a new loop; what loops and threads log or print is a failure."""
    factory: Any = asyncio.new_event_loop
    if request.param == "uvloop":
        factory = pytest.importorskip("uvloop").new_event_loop

    def with_patience(coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def within() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await coroutine

        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(within())

    with caplog.at_level(logging.INFO):
        yield with_patience
    assert [record.getMessage() for record in caplog.records] == []
