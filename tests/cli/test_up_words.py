"""What `hoplite-mp up` says of a standby that cannot be: one line, before anything has begun."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli.status import standby
from hoplite_mp._cli.up_join import HostCluster

if TYPE_CHECKING:
    from pathlib import Path

UP = [sys.executable, "-m", "hoplite_mp", "up", "--listen", "127.0.0.1:0"]


@pytest.mark.parametrize(
    ("standby", "words"),
    [
        ("0.0.0.0:7001", "give an address of another host"),
        ("[::]:7001", "give an address of another host"),
        ("127.0.0.1:7001", "give an address of another host"),
        ("", "''"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_standby_that_cannot_be(tmp_path: Path, standby: str, words: str) -> None:
    token = tmp_path / "token"
    done = subprocess.run(
        [*UP, "--standby", standby, "--token-file", str(token)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert words in line
    assert not token.exists()


def test_two_standbys(tmp_path: Path) -> None:
    standbys = ["--standby", "10.0.0.1:7001", "--standby", "10.0.0.2:7001"]
    done = subprocess.run([*UP, *standbys], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--standby was given twice" in done.stderr


def test_a_standby_that_is_not_there_yet(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with HostCluster(
        listen="127.0.0.1:0", standby=("10.9.9.9:7001",), workers=1, token=token
    ) as cluster:
        (line,) = standby(cluster)
        assert line.startswith("standby at 10.9.9.9:7001: no host with that address has joined")
    with HostCluster(listen="127.0.0.1:0", workers=1, token=token) as cluster:
        assert standby(cluster) == []


@pytest.mark.parametrize("wrong", ["gpu", "gpu=x", "gpu=-1", "gpu=1,gpu=2", "=1", "a b=1"])
def test_resources_that_cannot_be(wrong: str) -> None:
    done = subprocess.run([*UP, "--resources", wrong], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "argument --resources: resources" in done.stderr
