"""A Ray cluster on emulated hosts, by Ray's own command line: the head on the first host."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from tests.engines.programs import ROOT, Logs, Program, start, until

if TYPE_CHECKING:
    from tests.lan import Host, Lan

__all__ = ["RayHosts"]

PORT = 6379
# Each host would claim 30 % of this machine's memory.
STORE_BYTES = 100_000_000
PYTHON = [sys.executable, "-W", "ignore"]

HEAD = """
import logging, os, sys, time
import numpy as np
import ray
import hoplite_mp
import hoplite_mp.integrations.ray as hoplite_ray
from hoplite_mp.integrations.ray import collective as col
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

PATIENCE_S = 90.0
# Ray prints warnings of its own to stdout.
said, sys.stdout = sys.stdout, sys.stderr

def until(reached, what):
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        if time.monotonic() > deadline:
            raise SystemExit("not within time: " + what)
        time.sleep(0.05)

def say(*words):
    print(*words, file=said, flush=True)

def heard():
    return sys.stdin.readline().strip()

def where():
    return os.uname().nodename

def here():
    c = hoplite_mp.current()
    return where(), c._runtime.tasks.node_number, c._host.attached

def on(host):
    # A task or an actor there, and nowhere else.
    address = f"10.77.0.{host}"
    (node,) = [n for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address]
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)}

ray.init(
    address="10.77.0.1:6379", _node_ip_address="10.77.0." + where()[1:],
    log_to_driver=False, logging_level=logging.ERROR,
)
"""


class RayHosts:
    """`ray start` on each host."""

    def __init__(
        self, lan: Lan, logs: Logs, *, cpus: int = 2, store_bytes: int = STORE_BYTES
    ) -> None:
        self.lan = lan
        self.logs = logs
        self.limits = f"--num-cpus={cpus}", f"--object-store-memory={store_bytes}"
        self.env = {
            "PYTHONPATH": str(ROOT),
            "HOPLITE_MP_BESIDE_IDLE_S": "2",
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": "/tmp",  # its own folder there is private to each host
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "90",
            # How soon Ray gives a silent host up; its own default is 30 s and more.
            "RAY_health_check_initial_delay_ms": "2000",
            "RAY_health_check_period_ms": "1000",
            "RAY_health_check_failure_threshold": "5",
        }
        self.rays: dict[int, subprocess.Popen[Any]] = {}
        first = lan[0]
        self.start(first, "--head", "--port", str(PORT), "--include-dashboard=false")
        until(lambda: self._answers(first), "Ray's head does not answer")

    def _answers(self, host: Host) -> bool:
        command = [*PYTHON, "-m", "ray.scripts.scripts", "health-check", "--address"]
        done = host.run(
            [*command, f"{self.lan[0].address}:{PORT}"],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return bool(done.returncode == 0)

    def start(self, host: Host, *role: str) -> None:
        """Ray on a host of its own /tmp/ray, in the foreground of a program that we can end."""
        words = " ".join(
            [
                *(sys.executable, "-W", "ignore", "-m", "ray.scripts.scripts", "start", *role),
                f"--node-ip-address={host.address}",
                *self.limits,
                "--block",
            ]
        )
        own = host.root / "tmp" / "ray"
        script = f"mkdir -p {own} /tmp/ray && mount --bind {own} /tmp/ray && exec {words}"
        log = self.logs.of(f"ray-{host.name}")
        self.rays[host.number] = start(host, ["sh", "-c", script], self.env, log)

    def add(self, host: Host) -> None:
        """One more node of Ray."""
        self.start(host, f"--address={self.lan[0].address}:{PORT}")

    def await_nodes(self, count: int) -> None:
        """Returns when so many hosts are Ray's."""
        self.run(
            self.lan[0],
            f"""
            until(lambda: sum(n["Alive"] for n in ray.nodes()) == {count}, "nodes of Ray")
            """,
        )

    def program(self, host: Host, text: str) -> Program:
        """A driver there."""
        command = [*PYTHON, "-c", HEAD + textwrap.dedent(text)]
        return Program(host, command, self.env, self.logs.of(f"driver-{host.name}"))

    def run(self, host: Host, text: str) -> list[str]:
        """A driver's lines."""
        return self.program(host, text).end()
