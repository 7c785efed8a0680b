"""Faults on emulated hosts: killed, stopped, cut off, leaving; workers and the manager as well.

What happens to a host lasts until it has joined again and all know of it; so long the tally says
that calls may feel it. The first host, that of the manager, stays.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

from tests.campaign.faults import Faults
from tests.support.clusters import signal_all

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping

    from tests.campaign.tally import Tally
    from tests.lan import Host, Lan

__all__ = ["HostFaults"]

LIVES_MAX = 4  # of one `join` that are short: six of them are its end
WRONG_MAX = 2
SECONDS = (0.2, 1.0, 2.5, 6.0)  # some are delays, some are deaths


class HostFaults(Faults):
    """As on one host, and these. away, back: a host is about to be away, is to come again;
    there: all are, and know each other; leave: that host leaves in order."""

    def __init__(
        self, lan: Lan, tally: Tally, dice: random.Random, kill_driver: Callable[[], None],
        away: Callable[[Host, str], None], back: Callable[[Host, str], None],
        there: Callable[[], bool], leave: Callable[[Host], None],
        more: Mapping[Callable[[], None], int],
    ) -> None:  # fmt: skip
        super().__init__(tally, dice, kill_driver, more)
        self.lan, self.away, self.back, self.there, self.leave = lan, away, back, there, leave
        self.wrong: dict[int, tuple[str, float]] = {}  # host -> what, until when
        self.lives: Counter[int] = Counter()
        self.open = 0  # faults that may still be felt
        self.kinds |= {self.kill_host: 2, self.stop_host: 2, self.cut_host: 2, self.let_go: 1}

    def make(self) -> None:
        super().make()
        now = time.monotonic()
        for number, (what, until) in list(self.wrong.items()):
            if now >= until:
                self.heal(number, what)
        if self.open and not self.wrong and self.there():
            for _ in range(self.open):
                self.tally.end("host")
            self.open = 0

    def heal(self, number: int, what: str) -> None:
        del self.wrong[number]
        host = self.lan.add(number) if what == "killed" else self._host(number)
        if what == "stopped":
            signal_all(host, signal.SIGCONT)
        elif what == "cut":
            host.mend()
        self.back(host, what)

    def heal_all(self) -> None:
        for number, (what, _) in list(self.wrong.items()):
            self.heal(number, what)

    def kill_host(self) -> None:
        self._to("killed")

    def stop_host(self) -> None:
        self._to("stopped")

    def cut_host(self) -> None:
        self._to("cut")

    def let_go(self) -> None:
        self._to("left")

    def _host(self, number: int) -> Host:
        (found,) = [host for host in self.lan if host.number == number]
        return found

    def _to(self, what: str) -> None:
        well = [h for h in self.lan if h.number > 1 and h.number not in self.wrong]
        if what in ("stopped", "cut"):
            well = [host for host in well if self.lives[host.number] < LIVES_MAX]
        if not well or len(self.wrong) >= WRONG_MAX:
            return
        host = self.dice.choice(well)
        self.lives[host.number] = 0 if what in ("killed", "left") else self.lives[host.number] + 1
        self.tally.begin("host")
        self.open += 1
        self.wrong[host.number] = what, time.monotonic() + self.dice.choice(SECONDS)
        self.away(host, what)
        if what == "killed":
            host.kill()
        elif what == "stopped":
            signal_all(host, signal.SIGSTOP)
        elif what == "cut":
            host.cut()
        else:
            self.leave(host)

    def _victim(self, name: str) -> Any:
        """Not one of a host that stands still: a stopped process would go on."""
        if any(what == "stopped" for what, _ in self.wrong.values()):
            return None
        return super()._victim(name)

    def _kill(self, name: str, kind: str) -> None:
        with contextlib.suppress(OSError):
            super()._kill(name, kind)
