"""A host without processes: both memories, the node's client, its store and its sweeper."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from hoplite_mp import _shm, _tasks
from hoplite_mp._node.io.spill_file import SpillFile
from hoplite_mp._node.objects.results import ResultWriter
from hoplite_mp._node.store.budget import Store
from hoplite_mp._node.tasks.sweeper import Sweeper
from hoplite_mp._node.trace_events import TraceEvents
from hoplite_mp.config import Config
from tests.support.node_ports import ManualLoop, UnhandledEvents

STATE = {name: number for number, name in enumerate(_shm.STATES)}
KIND_TASK = 2
NODE = 0
POOL = 1
CLIENTS, TABLES, TABLE_HEADERS = 256, 1024, 4096
LEASED = (1 << 64) - 1
# As in shm_layout.h: the words of a client slot, of a pool, of the parking.
OFF_SPINNERS = 72
OFF_CLIENTS, CLIENT_BYTES = 65536, 256
OFF_POOLS, POOL_BYTES, POOLS = OFF_CLIENTS + CLIENTS * CLIENT_BYTES, 128, 256
OFF_PARKS, PARKS = OFF_POOLS + POOLS * POOL_BYTES, 256
OFF_BOARDS, BOARD_BYTES, BOARDS = OFF_PARKS + PARKS * 32, 128 + 64 * 64, 64
OFF_QUEUES, QUEUE_BYTES, QUEUES = OFF_BOARDS + BOARDS * BOARD_BYTES, 192 + 8 * 4096, 512
OFF_TABLES, TABLE_BYTES = OFF_QUEUES + QUEUES * QUEUE_BYTES, 192 + 6 * 512
OFF_HEADERS = (OFF_TABLES + TABLES * TABLE_BYTES + 4095) & ~4095


class HostMemory:
    """Both memories of a host: slot 0, and what makes further slots in this process or in forked
    ones. Subclasses add the store."""

    store: Store
    length = 1 << 30  # bytes of the store's memory

    def __init__(
        self,
        *,
        span_bytes: int = 1 << 16,
        small_max: int = 4096,
        cores: int = 2,
        spin_us: int = 0,
        host_id: int = 77,
    ) -> None:
        self.fds = (
            os.memfd_create("control"),
            os.memfd_create("store"),
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC),
        )
        _shm.create(
            self.fds[0], self.fds[1], host_id, self.length, cores, spin_us, small_max, span_bytes
        )
        self.host_id = host_id
        self.config = Config(
            span_bytes=span_bytes,
            small_object_bytes_max=small_max,
            spill_dir=tempfile.gettempdir(),
        )
        self.node = _shm.NodeClient(self.fds[0], self.fds[1], NODE, self.fds[2])
        self.node_tasks = _tasks.Tasks(self.node)

    def client(self, slot: int = 0) -> _shm.Client:
        """A client of this process in a slot that is registered, or in a fresh one."""
        if not slot:
            slot = self.node.register(0, 2, POOL)
        return _shm.Client(self.fds[0], self.fds[1], slot, self.fds[2])

    def with_span(self, slot: int = 0, spans: int = 1) -> _shm.Client:
        client = self.client(slot)
        for _ in range(spans):
            self.give_span(client)
        return client

    def give_span(self, client: _shm.Client) -> int:
        start = self.store.lease_span(client.slot)
        assert start is not None
        client.add_span(start)
        return start

    def word(self, offset: int, size: int = 8) -> int:
        """A word of the control memory."""
        return int.from_bytes(os.pread(self.fds[0], size, offset), "little")

    def write_word(self, offset: int, value: int, size: int = 8) -> None:
        os.pwrite(self.fds[0], value.to_bytes(size, "little"), offset)

    def table(self, table: int) -> int:
        """Where the words of a table begin."""
        return OFF_TABLES + table * TABLE_BYTES

    def masks_with(self, slot: int) -> list[str]:
        """Bitmaps outside the headers that name this slot."""
        places = {f"park {i}": OFF_PARKS + 32 * i for i in range(PARKS)}
        places |= {f"idle {i}": OFF_POOLS + POOL_BYTES * i + 64 for i in range(POOLS)}
        places |= {f"spinning {i}": OFF_POOLS + POOL_BYTES * i + 96 for i in range(POOLS)}
        places |= {f"beside {i}": OFF_POOLS + POOL_BYTES * i + 32 for i in range(POOLS)}
        places["spinners"] = OFF_SPINNERS
        data = os.pread(self.fds[0], OFF_BOARDS, 0)
        byte, bit = slot // 8, 1 << slot % 8
        return [name for name, at in places.items() if data[at + byte] & bit]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


class ShmHost(HostMemory):
    """Both memories with a store, a sweeper and an open pool, and no other component."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        config = self.config
        self.loop = ManualLoop()
        self.node_events: Any = UnhandledEvents()
        self.trace_events = TraceEvents(self.loop, self.node_events)
        self.store = Store(
            self.node,
            config,
            self.length // 2,
            self.fds[1],
            self.loop,
            SpillFile(config.spill_dir, config.spill_bytes_max),
            self.trace_events,
            self.node_events,
        )
        self.results = ResultWriter(self.node, self.node_tasks, self.store, config)
        self.sweeper = Sweeper(self.results, self.node_events)
        self.node.open_pool(POOL, 1)
        self.queue = self.node_tasks.open_queue(POOL)

    def sweep(self, slot: int) -> None:
        """What the node does when the process of that slot has ended by SIGKILL."""
        self.sweeper.sweep(slot, None, -9)
        self.post_queued()

    def post_queued(self) -> None:
        """The dead one may have taken hints with it: all queued tasks are announced again."""
        for header in self.node.scan():
            if header["state"] == "QUEUED":
                self.node_tasks.post(header["id"], self.queue)


def kept_waiting(*pids: int) -> float:
    """Seconds in which threads of this process, or of others, could run and had no processor: what
    is left of a time without them is the same whatever else the machine does."""
    nanoseconds = 0
    for pid in pids or (os.getpid(),):
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):  # it has ended, or an odd kernel
                nanoseconds += int(path.read_text().split()[1])
    return nanoseconds / 1e9


def describe(headers: list[dict[str, Any]]) -> str:
    return "\n".join(str(header) for header in headers[:10])


SECOND = 10**9
SLICE_S = 0.5


class Party:
    """A client slot with its tasks and a queue."""

    def __init__(self, host: HostMemory, slot: int = 0) -> None:
        self.client = host.client(slot)
        self.slot = self.client.slot
        self.tasks = _tasks.Tasks(self.client)
        self.queue = self.tasks.open_queue(POOL)

    def task(self, ready: bool = True, **options: int) -> int:
        oid = self.client.new(KIND_TASK, STATE["WAITING"], 0, POOL)
        retries, timeout = options.get("retries", 0), options.get("timeout", 0)
        self.tasks.submit(oid, 0, b"", 0, retries, timeout, 0, b"t", self.queue, ready)
        return oid

    def finish(self, oid: int) -> None:
        self.client.bind_inline(oid, b"x" * 16, [], [], 16, False)
        assert self.tasks.finish(oid, False)


def put_bytes(client: _shm.Client, data: bytes, refs: bool = False) -> int:
    """A sealed object in a small block."""
    at = client.allocate(len(data))
    assert at
    client.write(at, data, [], [])
    return client.publish(at, len(data), refs)
