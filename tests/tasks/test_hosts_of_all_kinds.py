"""Programs and hosts of which the tests' own is none: many CPUs, closed standard descriptors, paths
with spaces, some of the GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import hoplite_mp
from hoplite_mp._client import launch
from hoplite_mp._supervisor.environment import device_environment
from tests.support.waiting import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import hoplite_mp
with hoplite_mp.Cluster(workers=1, memory="64MiB") as c:
    found = c.submit(abs, -3).result(60)
open({path!r}, "w").write(str(found))
"""
BLAS = """
import ctypes, os
from hoplite_mp._supervisor.environment import set_blas_threads
library = ctypes.CDLL({path!r})
if {gone}:
    os.unlink({path!r})
set_blas_threads(2)
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors(tmp_path: Path, closed: str) -> None:
    path = tmp_path / "found"
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(path=str(path)))
    command = f"exec {sys.executable} {program} {closed}"
    assert subprocess.run(["sh", "-c", command], timeout=2 * PATIENCE_S).returncode == 0
    assert path.read_text() == "3"


def test_closed_output_whose_number_a_file_of_a_library_has(tmp_path: Path) -> None:
    """Under Python 3.15 libffi opens such a file. The supervisor does not inherit the file."""
    path = tmp_path / "found"
    program = tmp_path / "program.py"
    taken = "import os\nassert os.open('/dev/null', os.O_WRONLY) == 1\n"
    program.write_text(taken + PROGRAM.format(path=str(path)))
    command = f"exec {sys.executable} {program} >&-"
    assert subprocess.run(["sh", "-c", command], timeout=2 * PATIENCE_S).returncode == 0
    assert path.read_text() == "3"


def test_more_cpus_than_a_host_may_have_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "cpu_count", lambda: 256)
    monkeypatch.setattr(launch, "WORKERS_MAX", 3)
    with hoplite_mp.Cluster(memory="64MiB") as cluster:
        assert cluster.nodes[0].workers == 3


@pytest.mark.parametrize("gone", [False, True])
def test_a_blas_under_a_path_with_spaces(tmp_path: Path, gone: bool) -> None:
    """It may also be another version's by now, as after an upgrade."""
    (tmp_path / "my env").mkdir()
    path = tmp_path / "my env" / "libopenblas of mine.so"
    with open("/proc/self/maps") as maps:
        shutil.copy(next(line.split()[-1] for line in maps if "/libm" in line), path)
    code = BLAS.format(path=str(path), gone=gone)
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0


@pytest.mark.parametrize(
    ("given", "indices", "found"),
    [
        (None, [1], "1"),
        ("2,3", [0], "2"),
        ("2, 3", [0, 1], "2,3"),
        ("GPU-a,GPU-b", [1], "GPU-b"),
        ("2", [1], "1"),
    ],
)
def test_devices_count_among_those_that_are_given(
    monkeypatch: pytest.MonkeyPatch, given: str | None, indices: list[int], found: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert device_environment({"gpu": indices}) == {"CUDA_VISIBLE_DEVICES": found}
    assert device_environment({"gpu": []}) == {}


def test_a_port_is_free_after_a_start_that_failed() -> None:
    host = ".".join(map(str, (127, *os.getpid().to_bytes(3, "big"))))  # no other program's
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(hoplite_mp.ConfigError) as caught:
        hoplite_mp.Cluster(1, listen=f"{host}:{port}", memory="1KiB")
    socket.create_server((host, port)).close()
    del caught  # until here the traceback has kept what the attempt had made
