"""What `hoplite-mp up` says of a standby that cannot be: one line, before anything has begun."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from hoplite_mp._cli import main, up_join
from hoplite_mp._cli.status import standby
from hoplite_mp._cli.up_join import HostCluster

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals of this process are the tests' own."""
    monkeypatch.setattr(up_join, "_on_signals", lambda: None)


def up(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code of a command that prints nothing on stdout, and its stderr."""
    try:
        code = main.main(["up", "--listen", "127.0.0.1:0", *words])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    assert said.out == ""
    return code, said.err


@pytest.mark.parametrize(
    ("standby", "words"),
    [
        ("0.0.0.0:7001", "pass an address of another host"),
        ("[::]:7001", "pass an address of another host"),
        ("127.0.0.1:7001", "pass an address of another host"),
        ("", "''"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_standby_that_cannot_be(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, standby: str, words: str
) -> None:
    token = tmp_path / "token"
    code, said = up(capsys, "--standby", standby, "--token-file", str(token))
    assert code == 1
    (line,) = said.splitlines()
    assert words in line
    assert not token.exists()


def test_two_standbys(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = up(capsys, "--standby", "10.0.0.1:7001", "--standby", "10.0.0.2:7001")
    assert code == 2
    assert "--standby may be given only once" in said


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
def test_resources_that_cannot_be(capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    code, said = up(capsys, "--resources", wrong)
    assert code == 2
    assert "argument --resources: resources" in said
