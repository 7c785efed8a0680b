"""The minimum CPU time on this machine: `floor.c`, compiled and run on emulated hosts.

The parent's side of the program that moves the same bytes over the same flows with plain sockets,
for comparison with this library and Gloo."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.lan.groups import rank_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.lan import Lan

__all__ = ["floor_rows"]

SOURCE = Path(__file__).with_name("floor.c")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-Wall")


def floor_rows(lan: Lan, rows: Sequence[str]) -> dict[str, float | None]:
    """Seconds of each row "kind:bytes:rounds", and processor seconds of the whole machine for one
    call under "row cpu"; nothing where there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        print("without the floor: there is no C compiler", file=sys.stderr)
        return {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        subprocess.run([compiler, *FLAGS, "-o", str(program), str(SOURCE)], check=True)
        addresses = ",".join(host.address for host in lan)
        return dict(rank_rows(lan, [str(program), addresses], {}, rows))
