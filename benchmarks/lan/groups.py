"""One rank on each emulated host: the parent's side, for calls of Groups and for peers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT
from benchmarks.lan.hosts import ENV, cluster

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Lan

__all__ = ["group_rows", "rank_rows"]

ROW_S_MAX = 200.0
"""Of a row: eight hosts that make and check all data on two busy cores take up to 100 s for one."""

MEMBER_MEMORY = "1500MiB"  # also of the first host's node, to which rank 0 attaches


def group_rows(lan: Lan, tls: bool, rows: Sequence[str], stored: bool = False) -> dict[str, float]:
    """Seconds of each row "kind:bytes:rounds" by calls of a Group, as rank_rows has them. stored:
    what is given lies in the store (`Group.empty`)."""
    with cluster(lan, tls, 0, MEMBER_MEMORY) as address:
        command = [
            sys.executable,
            "-m",
            "benchmarks.lan.member",
            address,
            str(int(tls)),
            str(int(stored)),
        ]
        return rank_rows(lan, command, ENV, rows)


def rank_rows(
    lan: Lan, command: Sequence[str], env: dict[str, str], rows: Sequence[str],
    row_s_max: float = ROW_S_MAX,
) -> dict[str, float]:  # fmt: skip
    """Runs `command size rank row...` on each host; of each row the median over rounds of the
    slowest rank, and under "row cpu", where rank 0 has told it, the mean over rounds of the
    processor seconds that the whole machine needed.

    RuntimeError names the first rank that fails, TimeoutError tells that some were not done in
    time. However it returns, no rank is left: each is a process group of its own, so that Ctrl-C
    ends it through this process.
    """
    hosts, patience_s = list(lan), row_s_max * len(rows)
    started: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor(len(hosts)) as pool:
        try:
            for rank, host in enumerate(hosts):
                started.append(
                    host.popen([*command, str(len(hosts)), str(rank), *rows], env=env, cwd=ROOT,
                               stdout=subprocess.PIPE, text=True, start_new_session=True)
                )  # fmt: skip
            ranks = [pool.submit(_found, rank, process) for rank, process in enumerate(started)]
            done, late = wait(ranks, patience_s, return_when=FIRST_EXCEPTION)
            for one in done:
                one.result()
            if late:
                raise TimeoutError(f"{len(late)} of {len(ranks)} ranks took over {patience_s:g} s")
            found = [one.result() for one in ranks]
        finally:
            for process in started:
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
    seconds = {
        row: statistics.median(max(turn) for turn in zip(*(one[row] for one in found), strict=True))
        for row in rows
    }
    processor = {
        cpu: statistics.fmean(found[0][cpu]) for row in rows if (cpu := f"{row} cpu") in found[0]
    }
    return seconds | processor


def _found(rank: int, process: subprocess.Popen[str]) -> Any:
    said = process.communicate()[0]
    if process.returncode:
        raise RuntimeError(f"rank {rank} ended with exit code {process.returncode}")
    return json.loads(said)
