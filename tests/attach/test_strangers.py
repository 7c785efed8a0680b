"""Who is not let in: without the token, as another user, through a directory that is not ours."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING

import psutil
import pytest

import hoplite_mp
from hoplite_mp._client import attached
from hoplite_mp._client.attached import _prove, _receive
from hoplite_mp._protocol.handshake import ClientHandshake
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.rendezvous import folders, reach
from hoplite_mp._transport.tokens import Token
from hoplite_mp.config import Config
from hoplite_mp.errors import AuthError, ProtocolError
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN
from tests.support.transport import own_introduction

if TYPE_CHECKING:
    from hoplite_mp._transport.conversation import Admission
    from tests.support.clusters import LoopbackCluster

NOBODY = 65534  # a user without any rights


def cluster_of(up: LoopbackCluster) -> bytes:
    (name,) = up.names()
    return bytes.fromhex(name)


def test_a_wrong_token(up: LoopbackCluster) -> None:
    with pytest.raises(AuthError, match="token"):
        up.attach(token="another token of good length")
    # Also of one who has asked no manager.
    cluster = cluster_of(up)
    sock = reach(cluster, PATIENCE_S)
    assert sock is not None
    with sock, pytest.raises(AuthError):
        _prove(
            sock, Token("another token of good length").key, own_introduction(), cluster, PATIENCE_S
        )
    with up.attach() as c:
        assert c.submit(abs, -1).result() == 1


def test_another_cluster_or_another_purpose(up: LoopbackCluster) -> None:
    key = Token(TOKEN).key
    for wanted, role in ((bytes(15) + b"x", "driver"), (cluster_of(up), "node")):
        sock = reach(cluster_of(up), PATIENCE_S)
        assert sock is not None
        with sock:
            handshake = ClientHandshake(key, role, own_introduction(), cluster=wanted)
            sock.settimeout(PATIENCE_S)
            sock.sendall(handshake.outgoing())
            with pytest.raises(ProtocolError):  # noqa: PT012 - it may come in pieces
                while data := sock.recv(handshake.wanted):
                    handshake.feed(data)
                    sock.sendall(handshake.outgoing())


def test_a_driver_at_the_ports_of_the_network(up: LoopbackCluster) -> None:
    """Memory is handed over by a UNIX socket only: nothing is said to it there."""
    with up.attach() as c:
        node = psutil.Process(c._runtime.tasks.pid(0))
        ports = [one.laddr.port for one in node.net_connections("inet") if one.status == "LISTEN"]
    assert len(ports) == 1

    def call(port: int) -> Admission:
        return Dialer(
            [Endpoint(socket.AF_INET, ("127.0.0.1", port))],
            key=Token(TOKEN).key,
            role="driver",
            mine=own_introduction(),
            tls=True,
            now=time.monotonic(),
            timeout_s=PATIENCE_S,
            handshake_timeout_s=PATIENCE_S,
        ).wait()

    with pytest.raises(ProtocolError, match="is the port right"):
        call(int(up.address.rpartition(":")[2]))
    stream = call(ports[0]).stream
    while (data := stream.read()) == b"":
        select.select([stream], [], [], PATIENCE_S)
    assert data is None
    stream.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, so it needs to be root")
def test_another_user(up_apart: LoopbackCluster) -> None:
    """Kept out by the directory; and if he had a way in, and the token, by the node."""
    up = up_apart
    (name,) = up.names()
    path = up.folder / name
    program = f"""
    import os, socket, sys
    from hoplite_mp._client.attached import _prove, _receive
    from hoplite_mp._transport.tokens import Token
    from tests.support.transport import own_introduction
    introduction = own_introduction()
    os.setgid({NOBODY})
    os.setuid({NOBODY})
    sock = socket.socket(socket.AF_UNIX)
    try:
        os.chdir({str(path.parent)!r})  # the whole path may be too long for a socket's name
        sock.connect({name!r})
    except OSError as error:
        print(type(error).__name__)
    else:
        _prove(sock, Token({TOKEN!r}).key, introduction, bytes.fromhex({name!r}), 60.0)
        told, fds = _receive(sock)
        print(type(told).__name__, told.reason, fds)
    """

    def answer() -> str:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_S,
        )
        return done.stdout.strip()

    assert answer() == "PermissionError"
    opened = [one for one in (path, *path.parents) if not one.stat().st_mode & 0o001]
    modes = [one.stat().st_mode & 0o7777 for one in opened]
    assert up.folder in opened
    try:
        for one in (path, *opened):
            one.chmod(0o711 if one != path else 0o777)
        assert (
            answer()
            == f"AttachRefused it belongs to user {NOBODY}, but this node belongs to user 0 []"
        )
        # Nor do we use a directory that others may write to.
        with up.attach() as c:
            assert len(c.nodes) == 2
    finally:
        for one, mode in zip(opened, modes, strict=True):
            one.chmod(mode)
    with up.attach() as c:
        assert len(c.nodes) == 1


def test_a_node_that_does_not_answer(
    own_up: LoopbackCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then this process takes part with one of its own. The manager has patience with the node."""
    up = own_up
    with up.attach() as c:
        pid = c._runtime.tasks.pid(0)
        os.kill(pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(attached, "_prove", lambda *args: _prove(*args[:-1], 1.0))
                other = up.attach(memory="64MiB")
            assert other._host is not None
            assert not other._host.attached
        finally:
            os.kill(pid, signal.SIGCONT)
        with other:
            assert other.submit(abs, -1).result() == 1
        assert c.submit(abs, -2).result() == 2


def test_a_full_host(up: LoopbackCluster) -> None:
    """Without a slot for it, a driver gets a node of its own."""
    cluster, taken = cluster_of(up), []
    while True:
        sock = reach(cluster, PATIENCE_S)
        assert sock is not None
        taken.append(sock)
        _prove(sock, Token(TOKEN).key, own_introduction(), cluster, PATIENCE_S)
        told, fds = _receive(sock)
        for fd in fds:
            os.close(fd)
        if not fds:
            break
    assert "slot" in told.reason  # type: ignore[union-attr]
    assert len(taken) > 200
    with up.attach(memory="64MiB") as c:
        assert len(c.nodes) == 2
    for sock in taken:
        sock.close()
    deadline = time.monotonic() + PATIENCE_S
    attached = False
    while not attached and time.monotonic() < deadline:
        with up.attach(memory="64MiB") as c:
            attached = len(c.nodes) == 1
    assert attached


def test_nobody_is_there(up: LoopbackCluster) -> None:
    """A name of this user's, but nobody at the address."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        config = Config(connect_timeout_s=0.3)
        with pytest.raises(hoplite_mp.ManagerLostError):
            hoplite_mp.Cluster(address=f"127.0.0.1:{sock.getsockname()[1]}", config=config)
    assert str(up.folder) == folders()[0]
