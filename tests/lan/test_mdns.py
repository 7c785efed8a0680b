"""`hoplite-mp join` without an address: the clusters that the network announces."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("zeroconf", reason="the extra `lan` is not installed")

from tests.support.clusters import HOPLITE, PATIENCE_S, TLS_OR_PLAIN, TOKEN

if TYPE_CHECKING:
    from pathlib import Path

    from tests.lan import Host, Lan


def listed(host: Host, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return host.run(
        [*HOPLITE, "join"],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.soak  # it listens for 3 s again and again
@pytest.mark.parametrize("tls", TLS_OR_PLAIN)
def test_clusters_are_listed_while_they_last(lan4: Lan, tls: bool, tmp_path: Path) -> None:
    env = {"HOPLITE_MP_TOKEN": TOKEN, "HOPLITE_MP_MEMORY_BYTES": "64MiB"}
    flag = [] if tls else ["--no-tls"]
    ups = []
    for host in (lan4[0], lan4[1]):
        words = ["up", "--listen", f"{host.address}:7000", "--workers", "0", *flag]
        ups.append(host.popen([*HOPLITE, *words], env=env, stdout=subprocess.PIPE, text=True))
        assert ups[-1].stdout is not None
        assert ups[-1].stdout.readline().startswith("hoplite-mp join")

    def lines() -> list[str]:
        return listed(lan4[2], {}).stdout.splitlines()

    def until(count: int) -> list[str]:
        deadline = time.monotonic() + PATIENCE_S
        while len(found := lines()) != count and time.monotonic() < deadline:
            pass  # each look lasts some seconds
        return found

    found = until(2)
    assert [line.split("  #")[0].split() for line in found] == [
        ["hoplite-mp", "join", f"{host.address}:7000", *flag] for host in (lan4[0], lan4[1])
    ]
    assert "on host h1" in found[0]
    assert TOKEN not in "".join(found)
    command = [sys.executable, "-m", "hoplite_mp", *found[0].split("  #")[0].split()[1:]]
    joined = lan4[2].popen(
        [*command, "--workers", "0"], env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert joined.stdout is not None
    assert b"node h1 of the cluster" in joined.stdout.readline()
    for host, up in zip((lan4[0], lan4[1]), ups, strict=True):
        host.signal(up, 15)
        up.communicate()
    joined.communicate()
    assert until(0) == []
    nothing = listed(lan4[2], {})
    assert nothing.returncode == 1
    assert "no cluster was announced" in nothing.stderr
