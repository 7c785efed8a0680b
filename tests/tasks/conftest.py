"""One cluster for the tests of a file that do no harm to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from hoplite_mp._client import captured_arrays
from tests.support.functions import WATCHES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hoplite_mp import Cluster


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """With WORKERS and MEMORY of the test's file, if it names them."""
    workers, memory = (
        getattr(request.module, name, usual)
        for name, usual in (("WORKERS", 2), ("MEMORY", "256MiB"))
    )
    with hoplite_mp.Cluster(workers=workers, memory=memory) as made:
        yield made


@pytest.fixture(params=["watched", "read in full"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Twice: the kernel tells which pages were written, and it does not."""
    kind: str = request.param
    if kind == "read in full":
        monkeypatch.setattr(captured_arrays, "available", lambda: False)
    elif not WATCHES:
        pytest.skip("the kernel does not tell, or must not")
    return kind
