"""One program of a campaign on one host: `python -m tests.campaign.program SEED SECONDS [KIND]`.

Why it exists: from one seed it makes a cluster and its drivers, lets them work while faults happen,
and looks at what is left. It raises what was found, with the seed, after printing where everybody
stands.
It must never know: single calls, single faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.attach.conftest import ROOT, TOKEN
from tests.campaign.driver import Orders
from tests.campaign.faults import Faults
from tests.campaign.leaks import Census, census, settled, steady
from tests.campaign.tally import Tally
from tests.campaign.watching import ANSWER_S, Failed, Watched, answer, command, healthy
from tests.tasks.test_manager_deaths import named

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["KINDS", "Program", "run"]

KINDS = ("roomy", "spilling", "full")
MEMORY = {"roomy": "512MiB", "spilling": "64MiB", "full": "48MiB"}
DISK = "24m"  # of the spill file, where that shall be full
ENVIRONMENT = {
    "HOPLITE_MP_CANCEL_GRACE_S": "0.2",
    "HOPLITE_MP_PUT_WAIT_S": "1",
    "HOPLITE_MP_GROUP_WAIT_S": "10",
}
RENEWED = ("hoplite manager", "hoplite worker")


class Program:
    """The cluster, its drivers, and the faults."""

    def __init__(self, seed: int, kind: str, folder: Path) -> None:
        self.seed, self.kind, self.folder = seed, kind, folder
        self.dice = random.Random(seed)
        self.tally = Tally(folder / "tally", make=True)
        self.workers = self.dice.randint(2, 4)
        self.drivers: list[Watched] = []
        self.numbers = 0
        self.calls: Counter[str] = Counter()
        self.env = {
            **os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), "HOPLITE_MP_TOKEN": TOKEN,
            "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder),
        }  # fmt: skip
        (folder / "scratch").mkdir()
        cluster = {
            "workers": self.workers, "listen": "127.0.0.1:0", "memory": MEMORY[kind],
            "spill_dir": str(folder / "spill"),
        }  # fmt: skip
        (folder / "spill").mkdir()
        if kind == "full":
            options = ["-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(folder / "spill")]
            subprocess.run(["mount", *options], check=True)
        self.maker = self.start(cluster)
        self.address = answer(self.maker, "ready", self.drivers)["address"]

    def start(self, cluster: dict[str, Any]) -> Watched:
        self.numbers += 1
        orders = Orders(
            seed=self.seed,
            number=self.numbers,
            threads=self.dice.randint(1, 2),
            tally=str(self.folder / "tally"),
            scratch=str(self.folder / "scratch"),
            cluster=cluster,
            small=self.kind != "roomy",
        )
        process = subprocess.Popen(
            command(orders),
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        made = Watched(f"driver {self.numbers}", process, process.send_signal)
        self.drivers.append(made)
        return made

    def attach(self) -> Watched:
        """Returns when it works."""
        made = self.start({"address": self.address})
        answer(made, "ready", self.drivers)
        made.tell("go")
        return made

    def kill_driver(self) -> None:
        attached = [one for one in self.drivers if one is not self.maker]
        if attached:
            victim = self.dice.choice(attached)
            victim.kill()
            self.drivers.remove(victim)
            victim.close()
            self.attach()

    def renew(self) -> None:
        """All workers and the manager are replaced: what they have kept for later is gone."""
        self.maker.tell("work")
        answer(self.maker, "worked", self.drivers)
        before = [one for name in RENEWED for one in named(name)]
        for one in before:
            one.kill()
        psutil.wait_procs(before, ANSWER_S)

    def census(self) -> Census:
        self.maker.tell("count")
        counted = answer(self.maker, "counted", self.drivers)
        return census(self.maker.process.pid, counted)

    def play(self, seconds: float) -> dict[str, int]:
        """The faults that were made."""
        self.maker.tell("warm")
        answer(self.maker, "dropped", self.drivers)
        self.renew()
        before = steady(self.census)
        faults = Faults(self.tally, self.dice, self.kill_driver)
        self.maker.tell("go")
        for _ in range(self.dice.randint(1, 2)):
            self.attach()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            faults.make()
            healthy(self.drivers)
        for one in self.drivers:
            one.tell("drop")
        for one in self.drivers:
            self.calls.update(answer(one, "dropped", self.drivers)["calls"])
        for one in list(self.drivers):
            if one is not self.maker:
                self.end(one)
        settled(self.census, before.with_caches(self.workers))
        self.renew()
        settled(self.census, before)
        self.end(self.maker)
        return dict(faults.made)

    def end(self, one: Watched) -> None:
        """In order."""
        one.tell("end")
        answer(one, "ended", self.drivers)
        one.process.wait(ANSWER_S)
        one.close()
        self.drivers.remove(one)

    def show(self) -> None:
        """Where everybody stands, on stderr."""
        for one in self.drivers:
            one.stacks()
        time.sleep(0.5)
        dump = ["dump", "--stacks", self.address]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "hoplite_mp", *dump],
                env=self.env, cwd=ROOT, timeout=20, check=False, stdout=sys.stderr,
            )  # fmt: skip

    def close(self) -> None:
        for one in self.drivers:
            one.close()
        if self.kind == "full":
            subprocess.run(["umount", str(self.folder / "spill")], check=False)


@contextlib.contextmanager
def opened(seed: int, kind: str) -> Iterator[Program]:
    with tempfile.TemporaryDirectory(prefix="campaign") as folder:
        program = Program(seed, kind, Path(folder))
        try:
            yield program
        except BaseException as error:
            if not isinstance(error, KeyboardInterrupt):
                program.show()
            raise
        finally:
            program.close()


def run(seed: int, seconds: float, kind: str | None = None) -> tuple[Counter[str], dict[str, int]]:
    """Plays one; the calls that were made, and the faults."""
    kind = kind or random.Random(seed).choice(KINDS)
    with opened(seed, kind) as program:
        try:
            faults = program.play(seconds)
        except Failed as error:
            raise Failed(f"seed {seed}, {kind}, {program.tally.counts()}: {error}") from None
        return program.calls, faults


if __name__ == "__main__":
    begun = time.monotonic()
    calls, made = run(int(sys.argv[1]), float(sys.argv[2]), *sys.argv[3:])
    print(sum(calls.values()), "calls", dict(calls), "faults", made)
    print(f"{time.monotonic() - begun:.1f} s")
