"""One program of a campaign on one host: `python -m tests.campaign.program SEED SECONDS [KIND]`.

From one seed it makes a cluster and its drivers, lets them work while faults happen, and looks at
what is left. It raises what was found, with the seed, after printing where everybody stands.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.campaign.company import Company
from tests.campaign.faults import Faults
from tests.campaign.leaks import Census, census, settled, steady
from tests.campaign.watching import ANSWER_S, Failed, Watched, command
from tests.support.clusters import ROOT, TOKEN
from tests.support.processes import processes_named

if TYPE_CHECKING:
    from collections import Counter

    from tests.campaign.driver import Orders

__all__ = ["ENVIRONMENT", "KINDS", "Program", "run"]

KINDS = ("roomy", "spilling", "full")
MEMORY = {"roomy": "512MiB", "spilling": "64MiB", "full": "48MiB"}
GROWN_MAX = 2
DISK = "24m"  # of the spill file, where that shall be full
ENVIRONMENT = {
    "HOPLITE_MP_CANCEL_GRACE_S": "0.2",
    "HOPLITE_MP_PUT_WAIT_S": "1",
    "HOPLITE_MP_GROUP_WAIT_S": "10",
    "HOPLITE_MP_MEMORY_IDLE_S": "0.5",
}
RENEWED = ("hoplite manager", "hoplite worker")


class Program(Company):
    """The cluster, its drivers, and the faults."""

    def __init__(self, seed: int, kind: str, folder: Path) -> None:
        super().__init__(seed, folder)
        self.kind, self.small = kind, kind != "roomy"
        self.workers = self.dice.randint(2, 4)
        self.grown = 0
        self.address = ""
        self.env = {
            **os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "HOPLITE_MP_TOKEN": TOKEN,
            "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder),
        }  # fmt: skip
        self.spill = folder / "spill"
        self.spill.mkdir()
        if kind == "full":
            options = ["-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.spill)]
            subprocess.run(["mount", *options], check=True)

    def popen(self, orders: Orders, place: Any) -> Watched:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command(orders), env=self.env, cwd=ROOT, **pipes)
        return Watched(f"driver {orders.number}", process, process.send_signal)

    def dump(self) -> subprocess.Popen[Any]:
        look = [sys.executable, "-m", "hoplite_mp", "dump", "--stacks", self.address]
        return subprocess.Popen(look, env=self.env, cwd=ROOT, stdout=sys.stderr)

    def make(self) -> None:
        """The driver whose cluster it is."""
        cluster = {
            "workers": self.workers, "listen": "127.0.0.1:0", "memory": MEMORY[self.kind],
            "spill_dir": str(self.spill),
        }  # fmt: skip
        self.maker = self.start(cluster)
        self.address = self.maker.said["ready"]["address"]

    def attach(self) -> None:
        how = {"interrupted": self.dice.random() < 0.5}
        self.start({"address": self.address}, **how).tell("go")

    def attached(self) -> list[Watched]:
        return [one for one in self.drivers if one is not self.maker]

    def kill_driver(self) -> None:
        """Another one comes in its place."""
        self.forget(self.dice.choice(self.attached()))
        self.attach()

    def drop_driver(self) -> None:
        """As kill_driver, in order, without a shutdown."""
        self.lose(self.dice.choice(self.attached()))
        self.attach()

    def add_worker(self) -> None:
        if self.grown < GROWN_MAX:
            self.grown += 1
            self.ask(self.maker, "grow", "grown")

    def renew(self) -> None:
        """All workers and the manager are replaced: what they have kept for later is gone."""
        self.ask(self.maker, "work", "worked")
        before = [one for name in RENEWED for one in processes_named(name)]
        for one in before:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was a surplus
                one.kill()
        psutil.wait_procs(before, ANSWER_S)

    def census(self) -> Census:
        counted = self.ask(self.maker, "count", "counted")
        return census([psutil.Process(self.maker.process.pid)], counted)

    def play(self, seconds: float) -> dict[str, int]:
        """The faults that were made."""
        self.make()
        self.ask(self.maker, "warm", "dropped")
        self.renew()
        before = steady(self.census)
        more = {self.drop_driver: 1, self.interrupt: 3, self.add_worker: 1}
        faults = Faults(self.tally, self.dice, self.kill_driver, more)
        self.maker.tell("go")
        for _ in range(self.dice.randint(1, 2)):
            self.attach()
        end = time.monotonic() + seconds
        while time.monotonic() < end or not (faults.made and self.maker.turns):
            faults.make()
            self.healthy()
        self.drop()
        for one in list(self.drivers):
            if one is not self.maker:
                self.end(one)
        before = before.with_workers(self.grown)
        settled(self.census, before.with_caches(self.workers + self.grown))
        self.renew()
        settled(self.census, before.with_imports())
        self.end(self.maker)
        return dict(faults.made)

    def close(self) -> None:
        super().close()
        if self.kind == "full":
            subprocess.run(["umount", str(self.spill)], check=False)


def run(seed: int, seconds: float, kind: str | None = None) -> tuple[Counter[str], dict[str, int]]:
    """Plays one; the calls that were made, and the faults."""
    kind = kind or random.Random(seed).choice(KINDS)
    with tempfile.TemporaryDirectory(prefix="campaign") as folder:
        program = Program(seed, kind, Path(folder))
        try:
            with program.playing():
                return program.calls, program.play(seconds)
        except Failed as error:
            raise Failed(f"seed {seed}, {kind}, {program.tally.counts()}: {error}") from None


if __name__ == "__main__":
    begun = time.monotonic()
    calls, made = run(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
    print(sum(calls.values()), "calls", dict(calls), "faults", made)
    print(f"{time.monotonic() - begun:.1f} s")
