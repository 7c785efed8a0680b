"""A cluster of one host that others can join, and drivers that attach to its node."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clusters import TOKEN, LoopbackCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def make_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., LoopbackCluster]]:
    """Starts clusters, with a directory for sockets of the test's own."""
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("HOPLITE_MP_TOKEN", TOKEN)
    made: list[LoopbackCluster] = []

    def make(workers: int = 2) -> LoopbackCluster:
        made.append(LoopbackCluster(runtime / "hoplite_mp", workers, tmp_path))
        return made[-1]

    yield make
    for up in made:
        if up.process.poll() is None:
            up.end()


@pytest.fixture
def up(make_up: Callable[..., LoopbackCluster]) -> Iterator[LoopbackCluster]:
    """A cluster with two workers; at its end no name is left."""
    made = make_up()
    yield made
    if made.process.poll() is None:
        assert made.end() == 0
        assert made.names() == []
