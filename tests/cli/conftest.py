"""A cluster on loopback, started as a user would, for commands that look at one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.lan import forked
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the commands look for is a test's own, whatever the user of this machine has."""
    for name in [name for name in os.environ if name.startswith("HOPLITE_MP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def running() -> Iterator[str]:
    """The address of a cluster without TLS with two workers."""
    command = [
        *(sys.executable, "-m", "hoplite_mp", "up", "--listen", "127.0.0.1:0", "--no-tls"),
        *("--workers", "2", "--memory", "256MiB"),
    ]
    with forked.popen(
        command,
        env={**os.environ, "HOPLITE_MP_TOKEN": TOKEN},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as up:
        assert up.stdout is not None
        words = up.stdout.readline().split()
        assert words[:2] == ["hoplite-mp", "join"]
        yield words[2]
        up.send_signal(signal.SIGTERM)
        assert up.wait(PATIENCE_S) == 0
