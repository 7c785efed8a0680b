"""Collectives on results of tasks, over emulated hosts: the parent's side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.lan.hosts import ENV, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Host

__all__ = ["ref_rounds", "ref_rows"]


def ref_rows(
    host: Host, address: str, tls: bool, kinds: Sequence[str], nbytes: int, rounds: int, size: int
) -> dict[str, float]:
    """Medians over rounds of what benchmarks/lan/driver.py measures; it runs on `host`."""
    found = ref_rounds(host, address, tls, kinds, nbytes, rounds, size)
    return {name: statistics.median(values) for name, values in found.items()}


def ref_rounds(
    host: Host, address: str, tls: bool, kinds: Sequence[str], nbytes: int, rounds: int, size: int
) -> dict[str, list[float]]:
    """The same, each round by itself, in their order."""
    numbers = [str(int(tls)), str(nbytes), str(rounds), str(size)]
    driver = host.popen(
        [sys.executable, "-m", "benchmarks.lan.driver", address, *numbers, *kinds],
        env=ENV, cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    found: dict[str, list[float]] = json.loads(driver.communicate(timeout=PATIENCE_S)[0])
    return found
