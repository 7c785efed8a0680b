"""`python -m benchmarks.lan.sgd [-n 8] [--seconds 20]`: asynchronous SGD while hosts die and join.

Needs root. A parameter server as in Hoplite (SIGCOMM 2021, section 6.3): the driver puts 4 MiB of
parameters, every host computes gradients of its parameters, a step uses the first half of the
gradients that are ready, and only the hosts of these get the new parameters. It runs first
undisturbed, then with a host killed every KILL_EVERY_S and a new one joining immediately. Printed:
steps per second, and the distance to the optimum, which must shrink."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.common import ROOT, Row
from benchmarks.report import table as drawn
from tests.lan import Lan, why_not
from tests.support.clusters import UpCluster

if TYPE_CHECKING:
    from collections.abc import Sequence

RATE = "1gbit"
KILL_EVERY_S = 5.0
PATIENCE_S = 120.0
WANTED = 0.8

PROGRAM = """
import pathlib
COUNT, SECONDS, FOLDER = {count}, {seconds}, pathlib.Path({folder!r})
best = np.linspace(-1, 1, 1 << 20, dtype=np.float32)
def gradient(w, best_ref, seed):
    noise = np.random.default_rng(seed).standard_normal(w.size, np.float32)
    return w - best_ref + 0.1 * noise
deadline = time.monotonic() + 60
while len([n for n in c.nodes if n.workers]) < COUNT:
    assert time.monotonic() < deadline, c.nodes
    time.sleep(0.01)
target = c.put(best, copies=2)
c.broadcast(target).result(60)
def train(name):
    w, seed, steps, slowest = np.zeros_like(best), 0, 0, 0.0
    given = c.put(w)
    pending = []
    for _ in range(COUNT):
        pending.append(c.submit(gradient, given, target, seed))
        seed += 1
    far = float(np.abs(w - best).mean())
    (FOLDER / name).touch()
    begun = last = time.monotonic()
    while last < begun + SECONDS:
        total = c.reduce([f.ref for f in pending], num=COUNT // 2)
        w = w - 0.1 / (COUNT // 2) * c.get(total, timeout=60)
        given = c.put(w)
        for i in total.contributors:
            pending[i] = c.submit(gradient, given, target, seed)
            seed += 1
        steps += 1
        now = time.monotonic()
        slowest, last = max(slowest, now - last), now
    (FOLDER / (name + " over")).touch()
    near = float(np.abs(w - best).mean())
    assert near < far / 2 or steps < 20, (near, far)
    print(steps / (last - begun), slowest, near, flush=True)
    for f in pending:
        f.cancel()
train("undisturbed")
time.sleep(1)
train("disturbed")
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whether the target is met or not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lan.sgd", description=__doc__)
    parser.add_argument("-n", type=int, default=8, help="hosts (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each part")
    options = parser.parse_args(arguments)
    why = why_not()
    if why is not None:
        print(why, file=sys.stderr)
        return 1
    killed = 0
    with Lan(options.n, RATE) as lan:
        cluster = UpCluster(lan, tls=False, memory="512MiB")
        folder = lan.root
        text = PROGRAM.format(count=options.n, seconds=options.seconds, folder=str(folder))
        driver = lan[0].popen(
            cluster.program(text),
            env=cluster.driver_env(lan[0]),
            stdout=subprocess.PIPE,
            text=True,
        )
        while not (folder / "disturbed").exists():
            if driver.poll() is not None:
                raise RuntimeError(f"the driver ended with exit code {driver.returncode}")
            time.sleep(0.01)
        at = time.monotonic()
        while not (folder / "disturbed over").exists() and driver.poll() is None:
            if time.monotonic() > at + KILL_EVERY_S:
                at += KILL_EVERY_S
                lan[1].kill()  # the oldest besides the manager's
                killed += 1
                cluster.join(lan.add(options.n + killed), 1)
            time.sleep(0.01)
        said, _ = driver.communicate(timeout=PATIENCE_S)
        (usual, slow, _), (disturbed, slowest, near) = (
            map(float, line.split()) for line in said.splitlines()
        )
        if cluster.up.stdout is not None:
            cluster.up.stdout.close()
    table = [
        Row(f"asynchronous SGD, {options.n} hosts, {killed} killed and joined", disturbed, "1/s",
            "undisturbed", usual, ratio=disturbed / usual, wanted=WANTED, direction=">="),
        Row("its slowest step", slowest, "s", "undisturbed", slow),
    ]  # fmt: skip
    print(drawn([row.as_dict() for row in table]))
    print(f"mean distance to the optimum at the end: {near:.3f}")
    results = ROOT / "benchmarks" / "results"
    results.mkdir(exist_ok=True)
    rows = [row.as_dict() for row in table]
    (results / f"sgd-{options.n}.json").write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
