"""Strangers at every port of a running cluster: silence, garbage, a wrong token, a replay.

Whatever they send, the connection ends, nobody joins, and the cluster goes on.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, ROOT, TLS_FIRST, TOKEN, UpCluster

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.lan import Host

LISTENING = "0A"  # of /proc/net/tcp

STRANGER = """
import os, socket, ssl, sys, threading, time
from hoplite_mp._common import ids
from hoplite_mp.errors import HopliteError
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.greetings import software_versions
from hoplite_mp._transport.addresses import Endpoint
from hoplite_mp._transport.caller import Dialer
from hoplite_mp._transport.tokens import Token

TLS = {tls}
me = Introduction(ids.random_host_id(), software_versions())

def caller(where, token, role):
    return Dialer([Endpoint(socket.AF_INET, where)], key=Token(token).key, role=role, mine=me,
                  tls=TLS, now=time.monotonic(), timeout_s=5, handshake_timeout_s=5)

def ended(sock):
    '''Does the other side close it within the deadline of a handshake?'''
    sock.settimeout(60)
    try:
        while sock.recv(65536):
            pass
    except (ConnectionError, ssl.SSLError):
        pass
    except TimeoutError:
        return False
    return True

def sends(where, data, tls=False):
    sock = socket.create_connection(where)
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        sock = context.wrap_socket(sock)
    with sock:
        try:
            sock.sendall(data)
        except ConnectionError:
            return True
        return ended(sock)

def wrong_token(where, role):
    try:
        caller(where, "not the token of this cluster", role).wait()
    except HopliteError:  # AuthError; ProtocolError where nobody has that role
        return True
    return False

def recorded(where):
    '''What a good client says on its way in, heard by somebody in between.'''
    heard = bytearray()
    server = socket.create_server(("127.0.0.1", 0))
    def between():
        near, _ = server.accept()
        far = socket.create_connection(where)
        def back():
            while data := far.recv(65536):
                near.sendall(data)
        threading.Thread(target=back, daemon=True).start()
        try:
            while data := near.recv(65536):
                heard.extend(data)
                far.sendall(data)
        except OSError:
            pass
        far.close()
    thread = threading.Thread(target=between, daemon=True)
    thread.start()
    try:
        role = "node" if where == {ports}[0] else "data"
        caller(server.getsockname(), {token!r}, role).wait().stream.close()
    except (HopliteError, OSError):
        pass  # this node is unknown there, but its words were right
    thread.join(10)
    return bytes(heard)

def attack(where):
    replay = recorded(where)
    said[where] = (
        where[1], len(replay) > 100,
        [wrong_token(where, role) for role in ("node", "peer", "data", "tool")],
        [sends(where, data) for data in (os.urandom(4096), b"GET / HTTP/1.0\\r\\n\\r\\n",
                                         b"\\x00" * 65536, replay)],
        TLS and [sends(where, data, True) for data in (os.urandom(4096), b"\\xff" * 65536)],
        sends(where, b""))

said = {{}}
threads = [threading.Thread(target=attack, args=(where,)) for where in {ports}]
for thread in threads: thread.start()
for thread in threads: thread.join()
for where in {ports}: print(*said[where])
"""


def ports_of(host: Host) -> list[int]:
    """What something on that host listens at, whoever may call."""
    program = "print(open('/proc/net/tcp').read(), open('/proc/net/tcp6').read())"
    done = host.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    rows = [line.split() for line in done.stdout.splitlines()]
    return sorted({int(r[1].rpartition(":")[2], 16) for r in rows if r[3:4] == [LISTENING]})


@pytest.fixture(scope="module")
def lan(lan_permitted: None) -> Iterator[Lan]:
    with Lan(3) as made:
        yield made


@pytest.mark.parametrize("tls", TLS_FIRST)
def test_strangers_get_in_nowhere(lan: Lan, tls: bool) -> None:
    cluster = UpCluster(lan, tls=tls, attaches=False)
    counted = """
    deadline = time.monotonic() + 30
    while sum(node.workers for node in c.nodes) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    print(sorted(c.map(lambda i: i * i, range(30))) == [i * i for i in range(30)],
          len([node for node in c.nodes if node.workers]), len(c.nodes))
    """
    assert cluster.run(lan[1], counted) == "True 3 4\n"
    doors = [(host.address, port) for host in lan for port in ports_of(host)]
    assert len(doors) == 4  # the manager's, and one of each node
    program = STRANGER.format(tls=tls, token=TOKEN, ports=doors)
    done = lan[2].run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=4 * PATIENCE_S,
    )
    over_tls = [True, True] if tls else False
    expected = [f"{p} True {[True] * 4} {[True] * 4} {over_tls} True" for _, p in doors]
    assert done.stdout.splitlines() == expected
    assert cluster.run(lan[1], counted) == "True 3 4\n"
    assert cluster.end() == [0, 0, 0]
