"""What docs/engines.md says of Dask, followed word for word on hosts with its addresses."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.engines.pages import blocks, environment, page_lan
from tests.engines.programs import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.lan import Host, Lan

SHELL, PROGRAMS = blocks("Dask")
PATIENCE_S = 120.0


def test_the_page_has_these_blocks() -> None:
    assert [text.split()[:2] for text in SHELL] == [["dask", "scheduler"], ["dask", "worker"]]
    assert len(PROGRAMS) == 2


@pytest.fixture
def lan() -> Iterator[Lan]:
    with page_lan(3) as made:
        yield made


@pytest.mark.long
@pytest.mark.timeout(240)
def test_the_commands_and_the_program(lan: Lan, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[0])

    def start(host: Host, command: str) -> None:
        with open(tmp_path / f"log-{host.name}", "wb") as log:
            host.popen(
                shlex.split(command),
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=host.root / "tmp",
            )

    start(lan[0], SHELL[0])
    for host in (lan[1], lan[2]):
        start(host, SHELL[1])
    # Dask does not wait for workers: a program that begins before they are there has none.
    wait = (
        "from distributed import Client; c = Client('192.168.1.10:8786', timeout=60); "
        "c.wait_for_workers(2, timeout=60)"
    )
    python = [sys.executable, "-W", "ignore"]
    done = lan[0].run([*python, "-c", wait], env=environment(), timeout=PATIENCE_S)
    assert done.returncode == 0
    done = lan[0].run(
        [*python, str(tmp_path / "program.py")],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0
    hosts, total = done.stdout.splitlines()
    assert sorted(hosts.strip("[]").replace("'", "").split(", ")) == ["h1", "h2", "h3"]
    assert total == "[100000. 100000. 100000. 100000. 100000. 100000. 100000. 100000.] (0, 1, 2, 3)"


def test_the_local_scheduler(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "285\n"
