"""Gloo, as part of torch.distributed, over emulated hosts: the parent's side.

Torch has its own environment (`make peers`), which neither the library nor its tests need. If it is
missing or does not work, the table has no such column, and a message says so."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.common import ROOT
from benchmarks.lan.groups import rank_rows
from tests.lan import DEVICE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.lan import Lan

__all__ = ["Gloo", "why_not"]

PYTHON = ROOT / ".venv-peers" / "bin" / "python"
PORT = 7998
PROBE = "import torch.distributed as d; assert d.is_gloo_available(), 'torch is without Gloo'"
PROBE_S_MAX = 60.0
"""torch is read from the disk: 3 s when it has been read before."""
ENV = {
    "GLOO_SOCKET_IFNAME": DEVICE,  # by itself it looks for the host's name, and finds loopback
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # no name server there, of which it warns
}


def why_not(python: Path = PYTHON) -> str | None:
    """Why Gloo cannot run beside ours here; None if it can."""
    if not python.exists():
        return f"there is no {python}: `make peers` makes it"
    try:
        subprocess.run(
            [python, "-c", PROBE], capture_output=True, text=True, check=True, timeout=PROBE_S_MAX
        )
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2] or f"exit code {error.returncode}"
        return f"{python} cannot import torch ({last}): `make peers` makes it"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not run: {error}"
    return None


class Gloo:
    """Measures the rows that ours has done, if it can here; says once if it cannot."""

    name = "Gloo"

    def __init__(self, python: Path = PYTHON) -> None:
        self._python = python
        why = why_not(python)
        self._here = why is None
        if why is not None:
            self._without(why)

    def rows(self, lan: Lan, rows: Sequence[str]) -> dict[str, float | None]:
        """Seconds of each row "kind:bytes:rounds", as ours; nothing if it is not here or fails."""
        if not self._here:
            return {}
        meeting = f"{lan[0].address}:{PORT}"
        command = [str(self._python), "-m", "benchmarks.peers.gloo_rank", meeting]
        try:
            return dict(rank_rows(lan, command, ENV, rows))
        except (RuntimeError, TimeoutError) as error:
            self._without(str(error))
            return {}

    def cannot(self, rows: Sequence[str]) -> dict[str, float | None]:
        """The answer for rows that it has no call for, as for TLS: its builds are without."""
        return dict.fromkeys(rows) if self._here else {}

    def _without(self, why: str) -> None:
        print(f"without {self.name}: {why}", file=sys.stderr)
