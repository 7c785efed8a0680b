"""A cluster of one host that others can join, and drivers that attach to its node."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.clusters import TOKEN, LoopbackCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def places(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    """The directory for sockets of clusters whose temporary files are in the folder."""
    runtime = folder / "runtime"
    runtime.mkdir(mode=0o700)
    patch.setenv("XDG_RUNTIME_DIR", str(runtime))
    patch.setenv("TMPDIR", str(folder))
    patch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    patch.setenv("HOPLITE_MP_HEARTBEAT_TIMEOUT_S", "60")  # no process is dead that has to wait
    return runtime / "hoplite_mp"


@pytest.fixture
def make_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LoopbackCluster]]:
    """Starts clusters, with a directory for sockets of the test's own."""
    folder = places(monkeypatch, tmp_path)
    made: list[LoopbackCluster] = []

    def make(workers: int = 2) -> LoopbackCluster:
        made.append(LoopbackCluster(folder, workers, tmp_path))
        return made[-1]

    yield make
    for up in made:
        if up.process.poll() is None:
            up.end()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoopbackCluster]:
    """A cluster with two workers for the tests of a file; at its end no name is left."""
    folder = tmp_path_factory.mktemp("up")
    with pytest.MonkeyPatch.context() as patch:
        made = LoopbackCluster(places(patch, folder), 2, folder)
        yield made
        assert made.end() == 0
        assert made.names() == []


@pytest.fixture
def own_up(make_up: Callable[..., LoopbackCluster]) -> Iterator[LoopbackCluster]:
    """The same for one test."""
    made = make_up()
    yield made
    if made.process.poll() is None:
        assert made.end() == 0
        assert made.names() == []


@pytest.fixture
def up_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackCluster]:
    """The same outside of pytest's own directory, whose mode each run of pytest changes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        made = LoopbackCluster(places(monkeypatch, Path(folder)), 2, Path(folder))
        yield made
        assert made.end() == 0
        assert made.names() == []
