"""The CPU time of an engine for each byte that it sends or receives, measured on this machine."""

from __future__ import annotations

import select
import socket
import time

import numpy as np

from hoplite_mp import _engine

__all__ = ["measured_byte_s"]

WARM_UP_BYTES, TRANSFER_BYTES = 8 << 20, 128 << 20
PATIENCE_S = 60.0
KEY = (1, 0, 0, 0)


def measured_byte_s() -> float:
    """CPU seconds to send, or to receive, one byte over TCP: half of the time that both engines of
    a transfer over loopback take, including the kernel. The measurement takes a fraction of a
    second. Raises TimeoutError if the transfer does not end."""
    engines = [_engine.Engine(incarnation) for incarnation in (1, 2)]
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ends = socket.create_connection(listener.getsockname()), listener.accept()[0]
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        links = [engine.connect(end.fileno(), 0) for engine, end in zip(engines, ends, strict=True)]
        for end in ends:  # the engines have their own descriptors
            end.close()
        for number, nbytes in enumerate((WARM_UP_BYTES, TRANSFER_BYTES)):
            key = (*KEY[:3], number)
            engines[0].cell(key, np.ones(nbytes, np.uint8), filled=True)
            target = np.ones(nbytes, np.uint8)
            begun = time.process_time()
            cell = engines[1].cell(None, target)
            engines[1].pull(cell, links[1], key)
            _wait(engines[1], cell)
            seconds = time.process_time() - begun
        return seconds / (2 * TRANSFER_BYTES)
    finally:
        for engine in engines:
            engine.stop()


def _wait(engine: _engine.Engine, cell: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        select.select([engine.fileno()], [], [], PATIENCE_S)
        if any(event[:2] == (_engine.FILLED, cell) for event in engine.events()):
            return
    raise TimeoutError("a transfer over loopback does not end")
