"""A host that was lost looks for its cluster: what `hoplite-mp join` says and returns."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from typing import Any

import pytest

from hoplite_mp._cli import up_join
from hoplite_mp._common.signals import StopRequest
from hoplite_mp.errors import AuthError, HopliteError, ManagerLostError

COMMON = {"workers": 1, "memory": None, "ports": None, "token": None, "tls": None}
GONE = ManagerLostError("nobody answers")


class Life:
    """A cluster whose node was given up, its host and its runtime."""

    holds_standby, given_up, standby = "", True, ()
    node_number = 3

    def __init__(self) -> None:
        self._host = self._runtime = self.tasks = self

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def come_back(
    monkeypatch: pytest.MonkeyPatch, lives: list[Any], is_up: bool, end: bool = False
) -> int:
    """is_up: does the manager's host answer, with nobody there who listens?"""
    ending = StopRequest()

    def join(*_: object) -> Any:
        if end and len(lives) == 1:
            ending.set()
        return lives.pop(0)

    monkeypatch.setattr(up_join, "_join", join)
    monkeypatch.setattr(up_join, "_await_end", lambda *_: None)
    monkeypatch.setattr(up_join, "_refuses", lambda address: is_up and not lives)
    return up_join._run_member("10.0.0.1:7000", (), dict(COMMON), ending)


@pytest.mark.parametrize(
    ("error", "is_up", "code", "last"),
    [
        (GONE, True, 0, "hoplite-mp: the cluster has ended"),
        (GONE, False, 1, "hoplite-mp: nobody answers"),
        (AuthError("another token"), True, 1, "hoplite-mp: another token"),
    ],
)
def test_it_is_not_let_in_again(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: HopliteError,
    is_up: bool,
    code: int,
    last: str,
) -> None:
    assert come_back(monkeypatch, [Life(), error], is_up) == code
    assert capsys.readouterr().err.splitlines()[-1] == last


@pytest.mark.parametrize("given_up", [False, True])
def test_the_end_of_the_cluster_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], given_up: bool
) -> None:
    life = Life()
    life._host.given_up, life._host.node_died, life._host.removed = given_up, False, False
    assert come_back(monkeypatch, [life], True) == 0
    told = "hoplite-mp: the cluster has ended"
    if not given_up:
        told += ", or this host has left it"
    assert capsys.readouterr().err.splitlines() == [told]


def test_join_of_a_removed_node_names_the_removal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    life = Life()
    life._host.given_up, life._host.node_died, life._host.removed = False, False, True
    assert come_back(monkeypatch, [life], True) == 0
    told = "hoplite-mp: node h3 was removed from the cluster (remove_node)"
    assert capsys.readouterr().err.splitlines() == [told]


def test_it_is_given_up_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert come_back(monkeypatch, [Life() for _ in range(up_join.REJOINS_MAX + 2)], False) == 1
    assert "was lost 6 times, each time within 120 s" in capsys.readouterr().err.splitlines()[-1]


def test_a_signal_ends_it_while_it_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert come_back(monkeypatch, [Life(), GONE], False, end=True) == 0


@pytest.mark.parametrize("how", ["signal", "end of input"])
def test_it_ends_while_it_looks_for_a_cluster(how: str) -> None:
    """Nobody waits for the 30 s in which a cluster may still begin."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        words = [sys.executable, "-m", "hoplite_mp", "join", address, "--token-file", "-"]
        with subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(b"a token of more than thirty-two bytes\n")
            process.stdin.flush()
            server.settimeout(20)
            server.accept()[0].close()  # it has begun to look
            if how == "signal":
                process.send_signal(signal.SIGINT)
            else:
                process.stdin.close()
            assert process.wait(20) == 0
            assert process.stdout.read() == b""
