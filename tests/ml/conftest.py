"""One cluster for the tests of a file that do no harm to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=2, memory="256MiB") as made:
        yield made
