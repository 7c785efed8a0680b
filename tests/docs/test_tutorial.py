"""The last step of the tutorial, as it says: three nodes on loopback, one of which is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.lan import forked
from tests.support.documents import EXAMPLE_ADDRESS, ROOT, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = [sys.executable, "-m", "hoplite_mp"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """The address of `up`, and the processes that have joined."""
    os.environ["HOPLITE_MP_TOKEN_FILE"] = str(tmp_path / "token")
    os.environ["HOPLITE_MP_HEARTBEAT_TIMEOUT_S"] = "60"  # however long a node has to wait
    ends = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = []
    try:
        up = [*COMMAND, "up", "--listen", "127.0.0.1:0", "--workers", "2"]
        started.append(forked.popen(up, env, ROOT, **ends))
        address = re.findall(r"127\.0\.0\.1:\d+", started[0].stdout.readline())[0]
        for _ in range(2):
            join = [*COMMAND, "join", address, "--workers", "2"]
            started.append(forked.popen(join, env, ROOT, **ends))
            assert "node" in started[-1].stdout.readline()
        yield address, started[1:]
    finally:
        del os.environ["HOPLITE_MP_TOKEN_FILE"], os.environ["HOPLITE_MP_HEARTBEAT_TIMEOUT_S"]
        for process in started:
            process.terminate()
        for process in started:
            process.communicate()


def test_a_host_is_killed_while_it_trains(
    hosts: tuple[str, list[subprocess.Popen[str]]], tmp_path: Path
) -> None:
    address, joined = hosts
    programs = [
        block.text
        for block in blocks(ROOT / "docs" / "tutorial.md")
        if block.language == "python" and EXAMPLE_ADDRESS.search(block.text)
    ]
    assert len(programs) == 1
    program, killed = tmp_path / "train.py", tmp_path / "killed"
    # Each member waits in one step until the host has been killed.
    step = "    for step in range(steps):\n"
    waits = (
        f"{step}        while step == 300 and not __import__('os').path.exists({str(killed)!r}):\n"
    )
    text = EXAMPLE_ADDRESS.sub(address, programs[0])
    assert text.count(step) == 1
    program.write_text(text.replace(step, waits + "            __import__('time').sleep(0.01)\n"))
    with forked.popen(
        [sys.executable, str(program), "1500"],
        {**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as training:
        assert training.stdout is not None
        lines = []
        for line in training.stdout:
            lines.append(line)
            if "step 200" in line:
                family = psutil.Process(joined[0].pid)
                for process in [*family.children(recursive=True), family]:
                    process.kill()
                killed.touch()
        text = "".join(lines)
        assert training.wait() == 0, text
    assert "members (0, 1, 2, 3, 4, 5)" in text
    after = re.findall(r"members (\([\d, ]+\)), error", text)[-1]
    assert len(after.split(",")) == 4, text
    results = dict(re.findall(r"^(\d) (.*)$", text, re.M))
    assert len(results) == 6, text
    finished = [float(value) for value in results.values() if re.fullmatch(r"[\d.e-]+", value)]
    assert len(finished) == 4, text
    assert max(finished) < 0.1
