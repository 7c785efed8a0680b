"""What `hoplite-mp up` and `join` say of the token: where it is missing, how it gets there."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from hoplite_mp._cli import main, up_join
from hoplite_mp._common.signals import StopRequest
from hoplite_mp._transport.tokens import load_token
from tests.lan import forked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import TypeAlias

    Start: TypeAlias = Callable[..., subprocess.Popen[str]]

HOPLITE = [sys.executable, "-m", "hoplite_mp"]
NOBODY = "127.0.0.1:9"
PATIENCE_S = 60.0


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A user who has no token yet."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a command; what a failed test leaves of it is killed."""
    with contextlib.ExitStack() as stack:

        def start(*words: str) -> subprocess.Popen[str]:
            command = [*HOPLITE, *words]
            process = stack.enter_context(
                forked.popen(
                    command,
                    env=dict(os.environ),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    return out, err


def test_join_without_a_token_is_an_error_before_anybody_is_called(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever is waited for is not this host: nothing is resolved, nothing slept."""
    monkeypatch.setattr("hoplite_mp._client.network.resolve", called)
    monkeypatch.setattr("hoplite_mp._cli.up_join.HostCluster", called)
    monkeypatch.setattr("hoplite_mp._cli.up_join._on_signals", Never)
    assert main.main(["join", NOBODY]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert f"{home}/.config/hoplite_mp/token does not exist" in line
    assert "copy it from the host where `hoplite-mp up` runs, mode 0600" in line


def test_cluster_without_a_token_is_an_error_before_anybody_is_called(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hoplite_mp._client.network.resolve", called)
    with pytest.raises(hoplite_mp.AuthError, match="copy it from the host where `hoplite-mp up`"):
        hoplite_mp.Cluster(address=NOBODY)


def directory(path: Path) -> None:
    path.mkdir()


def empty(path: Path) -> None:
    path.touch(0o600)


def open_to_others(path: Path) -> None:
    path.write_text("a token for tests, long enough")
    path.chmod(0o644)


def below_a_file(path: Path) -> None:
    path.symlink_to("/dev/null/token")


@pytest.mark.parametrize("wait", [[], ["--wait", "60"]])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (directory, "is a directory: specify the file in it"),
        (empty, "is empty: copy it from the host where `hoplite-mp up` runs"),
        (open_to_others, "is open to others (mode 0644): chmod 600"),
        (below_a_file, "cannot be read by user"),
    ],
)
def test_a_file_that_is_no_token_is_an_error_at_once(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: Callable[[Path], None],
    words: str,
    wait: list[str],
) -> None:
    """Also with --wait: waiting does not mend it."""
    monkeypatch.setattr("hoplite_mp._cli.up_join.HostCluster", called)
    monkeypatch.setattr("hoplite_mp._cli.up_join._on_signals", Never)
    monkeypatch.setattr("hoplite_mp._transport.tokens.WRITING_S_MAX", 0.05)
    path = home / "spoiled"
    spoil(path)
    assert main.main(["join", NOBODY, "--token-file", str(path), *wait]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(path) in line
    assert words in line


def test_with_wait_it_says_what_it_waits_for_and_goes_on(home: Path, started: Start) -> None:
    token = home / "copied"
    process = started("join", NOBODY, "--no-tls", "--token-file", str(token), "--wait", "45")
    assert process.stderr is not None
    line = process.stderr.readline()  # now, not after 45 s: there is no other end of this read
    assert line.startswith(f"hoplite-mp: {token} does not exist yet: waiting up to ")
    assert "Copy the token" in line
    assert process.poll() is None
    load_token(token, make=True)
    out, err = ended(process)  # whether it still looked or called already
    assert (out, err) == ("", "")


class ClockOfWaits:
    """Only goes on while the command waits."""

    def __init__(self, waited: list[float]) -> None:
        self.waited = waited

    def monotonic(self) -> float:
        return sum(self.waited)


def test_a_wait_that_ends_without_the_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    asked = StopRequest()
    monkeypatch.setattr(asked, "wait", waited.append)
    monkeypatch.setattr(up_join, "_on_signals", lambda: asked)
    monkeypatch.setattr(up_join, "clock", ClockOfWaits(waited))
    monkeypatch.setattr(up_join, "HostCluster", called)
    assert main.main(["join", NOBODY, "--wait", "0.3"]) == 1
    assert sum(waited) >= 0.3
    said = capsys.readouterr().err.splitlines()
    assert "does not exist yet: waiting up to 0.3 s" in said[0]
    assert "there is no token: " in said[1]
    assert len(said) == 2


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf", "soon"])
def test_a_wait_that_cannot_be(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["join", NOBODY, f"--wait={seconds}"])
    assert "--wait: must be a number of seconds, at least 0" in capsys.readouterr().err


def test_up_says_what_its_line_is_for(home: Path, started: Start) -> None:
    """One line on stdout, without the path where every host looks by itself."""
    up = started("up", "--listen", "127.0.0.1:0", "--workers", "1")
    assert up.stdout is not None
    line = up.stdout.readline()
    out, err = ended(up)
    assert out == ""
    assert line.split()[:2] == ["hoplite-mp", "join"]
    assert len(line.split()) == 3
    (said,) = err.splitlines()
    assert "with 1 worker on this host, until SIGTERM or Ctrl-C" in said
    assert "To add another host, run the command that is printed to stdout" in said
    assert f"copying {home}/.config/hoplite_mp/token to it (mode 0600)" in said


def test_up_names_a_file_that_joiners_would_not_find(home: Path, started: Start) -> None:
    token = home / "a file"
    up = started("up", "--listen", "127.0.0.1:0", "--workers", "0", "--token-file", str(token))
    assert up.stdout is not None
    words = shlex.split(up.stdout.readline())
    _, err = ended(up)
    assert words[3:] == ["--token-file", str(token)]
    assert f"copying {token} to it (mode 0600); --token-file is the path of the copy" in err


def test_up_with_a_token_that_came_from_no_file(
    home: Path, monkeypatch: pytest.MonkeyPatch, started: Start
) -> None:
    monkeypatch.setenv("HOPLITE_MP_TOKEN", "a token for tests, long enough")
    up = started("up", "--listen", "127.0.0.1:0", "--workers", "0", "--no-tls")
    assert up.stdout is not None
    words = up.stdout.readline().split()
    _, err = ended(up)
    assert words[3:] == ["--no-tls"]
    assert "with the same HOPLITE_MP_TOKEN" in err
    assert os.environ["HOPLITE_MP_TOKEN"] not in err


def called(*_: object, **__: object) -> None:
    raise AssertionError("nobody is to be called without a token")


class Never:
    """Of a process whose signals are the tests' own."""

    def is_set(self) -> bool:
        return False

    def wait(self, timeout: float) -> bool:
        time.sleep(timeout)
        return False
