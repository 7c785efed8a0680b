"""examples/web_service.py as it stands: 200 requests at a time, also while a worker is killed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

Server = tuple[tuple[str, int], psutil.Process]
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "web_service.py"
AT_A_TIME = 200
MODEL = np.random.default_rng(0).random((4, 1000))


@pytest.fixture
def server() -> Iterator[Server]:
    """Its address, and its process."""
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLE), "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"running on http://([\d.]+):(\d+)", line):
                break
        else:
            raise AssertionError("it has not started")
        yield (found[1], int(found[2])), psutil.Process(process.pid)
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(20) in (0, -signal.SIGINT), rest
        assert "Traceback" not in rest
        assert "Finished server process" in rest
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


async def ask(address: tuple[str, int], features: Any) -> tuple[int, Any]:
    """One request over a connection of its own: (status, what came as JSON)."""
    reader, writer = await asyncio.open_connection(*address)
    data = json.dumps({"features": features}).encode()
    head = "POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    status, _, text = answer.decode().partition("\r\n\r\n")
    return int(status.split()[1]), json.loads(text)


async def ask_many(address: tuple[str, int], meanwhile: Any) -> list[Any]:
    rounds = []
    for _ in range(2):
        asked = [asyncio.ensure_future(ask(address, [i, 1, -i, 0.5])) for i in range(AT_A_TIME)]
        await asyncio.sleep(0.02)
        meanwhile()
        rounds.append(await asyncio.gather(*asked))
    assert rounds[0] == rounds[1]
    assert {status for status, _ in rounds[0]} == {200}
    status, answer = await ask(address, [1, 2])  # what fails in the worker
    assert status == 422
    assert "error" in answer
    return [answer for _, answer in rounds[0]]


def test_many_requests_at_a_time(server: Server) -> None:
    address, process = server
    answers = asyncio.run(ask_many(address, lambda: None))
    for i, answer in enumerate(answers):
        scores = np.array([i, 1, -i, 0.5]) @ MODEL
        assert answer == {"best": int(scores.argmax()), "score": float(scores.max())}
    assert process.num_threads() < 20  # none for each request


def test_a_worker_that_dies_meanwhile(server: Server) -> None:
    address, process = server
    killed = []

    def kill_a_worker() -> None:
        for one in process.children(recursive=True):
            if one.name().startswith("hoplite worker") and one not in killed:
                killed.append(one)
                one.kill()
                return

    asyncio.run(ask_many(address, kill_a_worker))
    assert killed
