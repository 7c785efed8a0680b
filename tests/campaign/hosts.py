"""One program of a campaign on emulated hosts: `python -m tests.campaign.hosts SEED SECONDS`.

This is program.py with `hoplite-mp up` and `join` on four hosts. Drivers on the first host outlive
everything; one on another host goes with it, or is told so, and is replaced. One that makes no
calls counts before and after.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tests.campaign.company import Company
from tests.campaign.host_faults import HostFaults
from tests.campaign.leaks import Census, census, settled, steady
from tests.campaign.program import ENVIRONMENT
from tests.campaign.watching import ANSWER_S, Failed, Watched, answer, command
from tests.lan import Lan
from tests.support.clusters import ROOT, UpCluster, signal_all
from tests.support.processes import processes_named

if TYPE_CHECKING:
    from collections import Counter

    from tests.campaign.driver import Orders
    from tests.lan import Host

__all__ = ["run"]

HOSTS, RATE = 4, "1gbit"
MEMORY = {False: "512MiB", True: "96MiB"}  # small?
WORKERS = 2
EXPOSED = 2  # the host of the driver that may be lost
REMOTE = {**ENVIRONMENT, "HOPLITE_MP_LINEAGE_BYTES_MAX": "256MiB"}
QUIET_S = 2.0  # after all are there: who was given up has been told
THERE_S = 60.0


class HostsProgram(Company):
    """The hosts, the cluster, its drivers and the faults."""

    lossy = True

    def __init__(self, seed: int, folder: Path, lan: Lan) -> None:
        super().__init__(seed, folder)
        self.lan = lan
        self.tls = self.dice.random() < 0.5
        self.small = self.dice.random() < 0.3
        memory = MEMORY[self.small]
        self.cluster = UpCluster(lan, tls=self.tls, workers=WORKERS, memory=memory, **REMOTE)
        self.risked: Watched | None = None
        self.since = 0.0

    def popen(self, orders: Orders, place: Any) -> Watched:
        process = place.popen(
            command(orders),
            env=self.cluster.driver_env(place),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        name = f"driver {orders.number} on {place.name}"
        return Watched(name, process, lambda number: place.signal(process, number))

    def dump(self) -> subprocess.Popen[Any]:
        look = [sys.executable, "-m", "hoplite_mp", "dump", "--stacks", self.cluster.address]
        more = [] if self.tls else ["--no-tls"]
        env = self.cluster.driver_env(self.lan[0])
        return self.lan[0].popen([*look, *more], env=env, cwd=ROOT, stdout=sys.stderr)

    def attach(self, host: Host) -> Watched:
        how = {"address": self.cluster.address, "tls": None if self.tls else False}
        more = {"exposed": host.number == EXPOSED, "interrupted": self.dice.random() < 0.4}
        made = self.start(how, host, **more)
        if host.number == EXPOSED:
            self.risked = made
        return made

    def kill_driver(self) -> None:
        """One of the first host; another one comes in its place."""
        self.forget(self.dice.choice(self.mine()))
        self.attach(self.lan[0]).tell("go")

    def drop_driver(self) -> None:
        """As kill_driver, in order, without a shutdown."""
        self.lose(self.dice.choice(self.mine()))
        self.attach(self.lan[0]).tell("go")

    def mine(self) -> list[Watched]:
        return [one for one in self.drivers if one not in (self.counting, self.risked)]

    # ---- hosts that go and come

    def away(self, host: Host, what: str) -> None:
        """That host is about to be killed, stopped, cut off; or it leaves."""
        if host.number == EXPOSED and self.risked is not None:
            self.risked.dying = what == "killed"
            self.risked.excused = what == "stopped"

    def back(self, host: Host, what: str) -> None:
        """It is to join again; its driver has been told, and another one comes later."""
        if what in ("killed", "left"):
            self.cluster.joined[host.number - 2] = self.cluster.join(host, WORKERS)
        exposed = self.risked
        if host.number != EXPOSED or exposed is None:
            return
        if what == "killed":
            self.drivers.remove(exposed)
            exposed.close()
        else:
            exposed.goes_on()
            self.calls.update(self.ask(exposed, "drop", "dropped")["calls"])
            exposed.tell("end")
            with contextlib.suppress(subprocess.TimeoutExpired):
                exposed.process.wait(ANSWER_S)
            answer(exposed, "ended", self.drivers)
            self.drivers.remove(exposed)
            exposed.close()
        self.risked = None

    def there(self) -> bool:
        """Are all hosts in the cluster, and have been for a while?"""
        nodes = self.ask(self.counting, "nodes", "named")["nodes"]
        now = time.monotonic()
        if len(nodes) < HOSTS or nodes != self.named:
            self.since, self.named = now, nodes
        return len(nodes) == HOSTS and now - self.since > QUIET_S

    def wait_for_all(self) -> None:
        deadline = time.monotonic() + THERE_S
        self.named: dict[str, str] = {}
        while not self.there():
            if time.monotonic() > deadline:
                raise Failed(f"hosts have not come again: {self.named}")
            time.sleep(0.1)

    def leave(self, host: Host) -> None:
        self.ask(self.counting, f"remove {host.name}", "removed")

    def close(self) -> None:
        """What stands still cannot be ended."""
        super().close()
        for host in self.lan:
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                signal_all(host, signal.SIGCONT)

    # ---- the play

    def renew(self) -> None:
        """All workers are replaced: what they have kept for later is gone."""
        self.ask(self.counting, "work", "worked")
        before = processes_named("hoplite worker")
        for one in before:
            with contextlib.suppress(psutil.NoSuchProcess):  # it was a surplus
                one.kill()
        psutil.wait_procs(before, ANSWER_S)

    def census(self) -> Census:
        counted = self.ask(self.counting, "count", "counted")
        return census([psutil.Process(host.outer.pid) for host in self.lan], counted)

    def play(self, seconds: float) -> dict[str, int]:
        first, second = self.lan[0], self.lan[EXPOSED - 1]
        self.counting = self.attach(first)
        self.wait_for_all()
        mine = self.attach(first)
        self.ask(mine, "warm", "dropped")
        self.end(mine)
        self.renew()
        before = steady(self.census)
        for host in (first, first, second):
            self.attach(host).tell("go")
        faults = HostFaults(
            self.lan, self.tally, self.dice, self.kill_driver,
            self.away, self.back, self.there, self.leave,
            {self.drop_driver: 1, self.interrupt: 3},
        )  # fmt: skip
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            faults.make()
            self.healthy()
            if self.risked is None and EXPOSED not in faults.wrong and self.there():
                self.attach(self.lan[EXPOSED - 1]).tell("go")
        faults.heal_all()
        self.drop()
        for one in list(self.drivers):
            if one is not self.counting:
                self.end(one)
        self.wait_for_all()
        self.renew()
        settled(self.census, before)
        self.end(self.counting)
        codes = self.cluster.end()
        if codes != [0] * HOSTS:
            raise Failed(f"exit codes {codes}")
        return dict(faults.made)


def run(seed: int, seconds: float) -> tuple[Counter[str], dict[str, int]]:
    """Plays one; the calls that were made, and the faults."""
    with tempfile.TemporaryDirectory(prefix="campaign") as folder, Lan(HOSTS, RATE) as lan:
        program = HostsProgram(seed, Path(folder), lan)
        try:
            with program.playing():
                return program.calls, program.play(seconds)
        except Failed as error:
            print(error, file=sys.stderr, flush=True)  # ending the hosts may fail as well
            raise Failed(f"seed {seed}, on hosts, {program.tally.counts()}: {error}") from None


if __name__ == "__main__":
    begun = time.monotonic()
    calls, made = run(int(sys.argv[1]), float(sys.argv[2]))
    print(sum(calls.values()), "calls", dict(calls), "faults", made)
    print(f"{time.monotonic() - begun:.1f} s")
