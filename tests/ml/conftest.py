"""One cluster for the tests of a file that do no harm to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from tests.support.clusters import lan_permitted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster

__all__ = ["cluster", "lan_permitted"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=3, memory="256MiB") as made:
        yield made
