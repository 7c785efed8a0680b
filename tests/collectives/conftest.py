"""One cluster for the tests of a file that do no harm to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def no_call_buffers() -> Iterator[None]:
    """Arrays that do not fit on a board become objects, in every cluster that the module opens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOPLITE_MP_GROUP_BUFFER_BYTES_MAX", "0")
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with hoplite_mp.Cluster(workers=2, memory="256MiB") as made:
        yield made
