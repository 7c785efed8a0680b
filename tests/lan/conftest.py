"""Emulated hosts for the tests of this folder; where there can be none they skip, and say why."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan, emulation
from tests.support.clusters import TLS_OR_PLAIN, UpCluster, lan_permitted

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["lan_permitted"]

# A host whose processes get no processor for a while is not to be lost. The death of a host's
# processes is noticed at once, because their connections end.
SILENCE, HEARTBEAT_TIMEOUT_S = "HOPLITE_MP_HEARTBEAT_TIMEOUT_S", 30.0


@pytest.fixture(scope="module", autouse=True)
def long_heartbeats() -> Iterator[None]:
    """Of all hosts that the tests of a file start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(emulation.settings, SILENCE, str(HEARTBEAT_TIMEOUT_S))
        yield


@pytest.fixture
def usual_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a test in which the silence of a host has to be noticed soon."""
    monkeypatch.delitem(emulation.settings, SILENCE)


@pytest.fixture
def lan4(lan_permitted: None) -> Iterator[Lan]:
    """Four hosts of a test's own, links not limited."""
    with Lan(4) as lan:
        yield lan


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    """Three hosts for the tests of a file."""
    with Lan(3) as made:
        yield made


@pytest.fixture(scope="module", params=TLS_OR_PLAIN)
def cluster(lan: Lan, request: pytest.FixtureRequest) -> Iterator[UpCluster]:
    """Their cluster, with WORKERS of the test's file on each host, or one."""
    made = UpCluster(lan, tls=request.param, workers=getattr(request.module, "WORKERS", 1))
    yield made
    assert made.end() == [0, 0, 0]
