"""Group calls over emulated hosts, one rank on each: the parent's side."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.lan.hosts import ENV, PATIENCE_S, cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Lan

__all__ = ["group_rows"]


def group_rows(lan: Lan, tls: bool, rows: Sequence[str]) -> dict[str, float]:
    """Seconds of each row "kind:bytes:rounds": the median over rounds of the slowest rank."""
    size = len(list(lan))
    with cluster(lan, tls, 0, "64MiB") as address:
        command = [sys.executable, "-m", "benchmarks.lan.member", address, str(size)]
        ranks = [
            host.popen([*command, str(rank), str(int(tls)), *rows], env=ENV, cwd=ROOT,
                       stdout=subprocess.PIPE, text=True)
            for rank, host in enumerate(lan)
        ]  # fmt: skip
        found = [json.loads(process.communicate(timeout=PATIENCE_S)[0]) for process in ranks]
    return {
        row: statistics.median(max(turn) for turn in zip(*(one[row] for one in found), strict=True))
        for row in rows
    }
