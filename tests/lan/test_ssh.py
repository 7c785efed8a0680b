"""Cluster(hosts=) over the real ssh: a server on each emulated host, keys of the test's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, ROOT, TOKEN, all_joins_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVER = shutil.which("sshd") or "/usr/sbin/sshd"
PROGRAM = """
import os, hoplite_mp
with hoplite_mp.Cluster(workers=1, hosts={hosts!r}) as c:
    print(sorted(c.options(node=n).submit(os.uname).result().nodename for n in c.nodes))
"""


@pytest.fixture
def lan(lan_permitted: None, tmp_path: Path) -> Iterator[Lan]:
    if not Path(SERVER).exists() or shutil.which("ssh") is None:
        pytest.skip("no ssh here (Debian: openssh-server, openssh-client)")
    for name in ("key", "host_key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True
        )
    (tmp_path / "settings").write_text(
        f"HostKey {tmp_path}/host_key\nAuthorizedKeysFile {tmp_path}/key.pub\nStrictModes no\n"
        "PidFile none\nPasswordAuthentication no\nPermitRootLogin prohibit-password\n"
    )
    with Lan(3) as made:
        servers = []
        for host in list(made)[1:]:
            host.run(["mkdir", "-p", "/run/sshd"])
            command = [SERVER, "-D", "-e", "-f", str(tmp_path / "settings")]
            servers.append((host, host.popen(command, stderr=subprocess.DEVNULL)))
        yield made
        for host, server in servers:
            host.signal(server, 9)
            server.wait()


def test_nodes_are_started_by_ssh(lan: Lan, tmp_path: Path) -> None:
    ssh = (
        f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null "
        f"-o LogLevel=ERROR -i {tmp_path}/key"
    )
    environment = {
        "HOPLITE_MP_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        "HOPLITE_MP_MEMORY_BYTES": "128MiB",
        "HOPLITE_MP_HOSTS_COMMAND": f"{ssh} {{host}} env PYTHONPATH={ROOT} "
        f"HOPLITE_MP_MEMORY_BYTES=128MiB {sys.executable} -m hoplite_mp {{arguments}}",
    }
    hosts = [lan[1].address, f"root@{lan[2].address}"]
    for host in hosts:  # until both servers answer
        reach = [*ssh.split(), host, "true"]
        deadline = time.monotonic() + PATIENCE_S
        while lan[0].run(reach, stderr=subprocess.DEVNULL).returncode:
            assert time.monotonic() < deadline, f"no answer from {host}"
            time.sleep(0.1)
    done = lan[0].run(
        [sys.executable, "-c", PROGRAM.format(hosts=hosts)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == "['h1', 'h2', 'h3']\n", done
    assert TOKEN not in done.stderr
    assert all_joins_ended(lan)
