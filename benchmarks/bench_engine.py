"""One pull over TCP compared with a plain loop of send and recv_into.

The bound: two processes on this host and one TCP connection over loopback. The sender sends from
warm memory, the receiver receives into warm memory, each in pieces of 1 MiB, and nothing else. The
engine pulls the same bytes between two processes, without and with checksums. Rounds alternate,
because the speed of shared memory varies over time.

    python benchmarks/bench_engine.py [--mebibytes 256] [--rounds 7]
"""

import argparse
import functools
import multiprocessing
import select
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from hoplite_mp import _engine

PIECE_BYTES = 1 << 20
MORE, ENOUGH = b"+", b"-"
# The test that the numbers are held against: this share of the plain loop, without checksums.
SHARE_WANTED = 0.85


def send_plainly(listener: socket.socket, nbytes: int, stop: Connection) -> None:
    """Sends everything once for each MORE that comes."""
    memory = memoryview(np.ones(nbytes, np.uint8))
    with listener.accept()[0] as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while link.recv(1) == MORE:
            for at in range(0, nbytes, PIECE_BYTES):
                link.sendall(memory[at : at + PIECE_BYTES])
    stop.poll(None)


def serve(listener: socket.socket, nbytes: int, checksum: bool, stop: Connection) -> None:
    """An engine with one cell, until the other side says that it is over."""
    engine = _engine.Engine(incarnation=1)
    with listener.accept()[0] as link:
        engine.connect(link.fileno(), 0, checksum)
    engine.cell((1, 0, 0, 0), np.ones(nbytes, np.uint8), filled=True)
    stop.poll(None)
    engine.stop()


class Peer:
    """The process on the other side."""

    def __init__(self, run: Callable[[socket.socket, Connection], None]) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.stop, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=run, args=(listener, theirs))
        self.process.start()
        theirs.close()
        self.socket = socket.create_connection(listener.getsockname())
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.close()

    def close(self) -> None:
        """Not by an end of file: those that were forked later have copies of the descriptors."""
        self.socket.close()
        self.stop.send(None)
        self.process.join()


class Plain:
    def __init__(self, nbytes: int) -> None:
        self.peer = Peer(lambda listener, stop: send_plainly(listener, nbytes, stop))
        self.memory = memoryview(np.zeros(nbytes, np.uint8))

    def __call__(self) -> None:
        self.peer.socket.sendall(MORE)
        at = 0
        while at < len(self.memory):
            at += self.peer.socket.recv_into(self.memory[at : at + PIECE_BYTES])

    def close(self) -> None:
        self.peer.socket.sendall(ENOUGH)
        self.peer.close()


class Pull:
    def __init__(self, nbytes: int, checksum: bool) -> None:
        self.peer = Peer(lambda listener, stop: serve(listener, nbytes, checksum, stop))
        self.memory = np.zeros(nbytes, np.uint8)
        self.engine = _engine.Engine(incarnation=2)
        self.link = self.engine.connect(self.peer.socket.fileno(), 0, checksum)

    def wait_for(self, kind: int) -> None:
        while True:
            select.select([self.engine.fileno()], [], [])
            for event in self.engine.events():
                if event[0] == kind:
                    return
                raise RuntimeError(f"the pull has failed: {event}")

    def __call__(self) -> None:
        cell = self.engine.cell((1, 0, 0, 0), self.memory)
        self.engine.pull(cell, self.link)
        self.wait_for(_engine.FILLED)
        self.engine.close(cell)
        self.wait_for(_engine.CLOSED)

    def close(self) -> None:
        self.engine.stop()
        self.peer.close()


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mebibytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    nbytes = options.mebibytes << 20
    # Those that fork come before those that have a thread.
    makers: list[tuple[str, Callable[[], Plain | Pull]]] = [
        ("plain recv_into and sendall", functools.partial(Plain, nbytes)),
        ("engine, no checksums", functools.partial(Pull, nbytes, False)),
        ("engine, checksums", functools.partial(Pull, nbytes, True)),
    ]
    runs = [(name, make()) for name, make in makers]
    taken = [[seconds(run) for _, run in runs] for _ in range(options.rounds + 1)][1:]
    for _, run in runs:
        run.close()
    print(f"{options.mebibytes} MiB over TCP loopback, {options.rounds} rounds in turns; GB/s")
    plain = 0.0
    for (name, _), times in zip(runs, zip(*taken, strict=True), strict=True):
        rate, best = nbytes / statistics.median(times) / 1e9, nbytes / min(times) / 1e9
        plain = plain or rate
        print(f"{name:30} median {rate:5.2f}  best {best:5.2f}  of plain {rate / plain:5.2f}")
        if name == "engine, no checksums":
            verdict = "holds" if rate / plain >= SHARE_WANTED else "FAILS"
            print(f"   at least {SHARE_WANTED} of the plain loop: {verdict}")


if __name__ == "__main__":
    main()
