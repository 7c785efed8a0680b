"""How many hosts are worth having for training with a parameter server?

One worker trains on this host, and is traced. `hoplite-mp predict` plays its steps on more hosts,
with a fast and a slow network. The first host has the parameters, each other host a worker.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import hoplite_mp

PARAMETERS, STEPS = 250_000, 20
HOSTS = "2,4,8"


class Server:
    def __init__(self):
        self.weights = np.zeros(PARAMETERS, np.float32)

    def pull(self):
        return self.weights

    def push(self, gradient):
        self.weights = self.weights - np.float32(0.1) * gradient


def work(server):
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        weights = server.pull().result()
        x = rng.normal(size=(32, 500)).astype(np.float32)
        error = x @ (weights.reshape(500, -1) - 1)
        server.push((x.T @ error / 32).ravel()).result()


def predicted(trace, bandwidth):
    """The rows of the table, also printed."""
    rows = trace.with_suffix(".rows")
    options = ["--hosts", HOSTS, "--bandwidth", bandwidth, "--json", str(rows)]
    command = [sys.executable, "-m", "hoplite_mp", "predict", str(trace), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    print(done.stdout)
    return json.loads(rows.read_text())["rows"]


def main():
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.json"
        with hoplite_mp.Cluster(workers=1) as c:
            server = c.actor(Server)
            with c.trace(trace):
                c.submit(work, server).result()
        fast, slow = (predicted(trace, bandwidth) for bandwidth in ("10Gbit", "100Mbit"))
    for one, other in zip(fast, slow, strict=True):
        gain = one["steps_per_s"] / other["steps_per_s"]
        print(f"{one['hosts']} hosts: 10 Gbit/s is {gain:.1f} times as fast as 100 Mbit/s")
    assert slow[-1]["bottleneck"] == "link"


if __name__ == "__main__":
    main()
