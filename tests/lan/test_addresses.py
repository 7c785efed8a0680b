"""On hosts of their own: what is advertised leads there, and what leads nowhere is passed over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.lan import Host, Lan

# The code under test, wherever it lies: entering a host leaves the working directory behind.
HERE = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}

ADVERTISE = """
import json, sys
from hoplite_mp._transport.addresses import *
manager = resolve(parse_address(sys.argv[2]))[0] if len(sys.argv) > 2 else None
print(json.dumps(advertised_addresses(sys.argv[1], manager)))
"""
LISTENER = """
import select, sys, time
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.certificates import Certificate
from hoplite_mp._transport.listener import Listener
from hoplite_mp._transport.sockets import listen
pem = sys.stdin.buffer.read()
listener = Listener(listen("::", [7000]), key=Secret(b"k" * 32), service="node", cluster=b"c" * 16,
    mine=Introduction(int(sys.argv[1]), {}), certificate=Certificate(pem), handshake_timeout_s=30,
    pending_handshakes_max=8)
print("up", flush=True)
let_in = []
while not let_in:
    select.select([listener], [], [], 0.1)
    let_in = listener.turn(time.monotonic())
stream = let_in[0].stream
stream.write(let_in[0].address.encode())
while stream.wants_write:
    stream.flush()
while stream.read() is not None:
    select.select([stream], [], [])
"""
CALL = """
import select, sys, time
from hoplite_mp._protocol.greetings import Introduction
from hoplite_mp._protocol.secret import Secret
from hoplite_mp._transport.addresses import *
from hoplite_mp._transport.caller import Dialer
endpoints = [one for text in sys.argv[2:] for one in resolve(parse_address(text))]
began = time.monotonic()
admission = Dialer(endpoints, key=Secret(b"k" * 32), role="data", mine=Introduction(1, {}),
    tls=True, host_id=int(sys.argv[1]), now=began, timeout_s=60, handshake_timeout_s=30).wait()
seconds = time.monotonic() - began
sock = admission.stream.detach()
sock.setblocking(True)
print(sock.recv(1000).decode(), admission.address, seconds)
sock.close()
"""


def advertised(host: Host, *arguments: str) -> Any:
    program = [sys.executable, "-c", ADVERTISE, *arguments]
    done = host.run(program, env=HERE, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def start_listener(host: Host, pem: bytes) -> subprocess.Popen[bytes]:
    listener = host.popen(
        [sys.executable, "-c", LISTENER, str(host.number)],
        env=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert listener.stdin is not None
    assert listener.stdout is not None
    listener.stdin.write(pem)
    listener.stdin.close()
    assert listener.stdout.readline() == b"up\n"
    return listener


def call(host: Host, wanted: Host, *places: str) -> list[str]:
    done = host.run(
        [sys.executable, "-c", CALL, str(wanted.number), *places],
        env=HERE,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    return str(done.stdout).split()


def container_bridge(host: Host) -> None:
    """The same address on every host, as container engines make it; it sorts before eth0."""
    for command in (
        "ip link add docker0 type bridge",
        "ip address add 172.17.0.1/16 dev docker0",
        "ip link set docker0 up",
    ):
        assert host.run(command.split()).returncode == 0


@pytest.mark.soak
def test_the_address_of_the_interface_that_leads_to_the_manager(lan4: Lan) -> None:
    manager, node = lan4[0], lan4[1]
    container_bridge(node)
    assert advertised(node, "0.0.0.0", f"{manager.address}:7000") == [node.address, "172.17.0.1"]
    assert advertised(node, "::", f"[{manager.address6}]:7000")[0] == node.address6
    # Before anybody has joined the manager's host names what is on a network, best first.
    container_bridge(manager)
    own = advertised(manager, "::")
    assert set(own) == {manager.address, manager.address6, "172.17.0.1"}
    assert own[-1] == "172.17.0.1"


def test_a_call_over_several_addresses_finds_the_right_host(lan4: Lan) -> None:
    """A bridge address that leads back to the caller's own host, then a dead host, then the way."""
    from tests.support.transport import certificate

    caller, callee = lan4[0], lan4[1]
    container_bridge(caller)
    container_bridge(callee)
    pem = certificate().pem
    with start_listener(caller, pem) as own_listener, start_listener(callee, pem) as listener:
        lan4[2].cut()
        places = ["172.17.0.1:7000", f"{lan4[2].address}:7000", f"{callee.address}:7000"]
        seen, used, seconds = call(caller, callee, *places)
        assert seen.startswith(f"{caller.address}:")
        assert used == f"{callee.address}:7000"
        assert 2.0 <= float(seconds) < 45.0  # the dead one costs ARRIVE_S, not all the 60 s
        assert listener.wait(30) == 0
        own_listener.kill()
    with start_listener(callee, pem) as listener:
        _, used, _ = call(caller, callee, f"[{callee.address6}]:7000")
        assert used == f"[{callee.address6}]:7000"
        assert listener.wait(30) == 0
