"""One member's side of a Group's calls when members live on several hosts.

Why it exists: there is no memory that all share, so a part goes to the node of this host, small
ones as bytes, large ones as objects; what the call results in comes back as one object.
It must never know: who leads, when a call is decided.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import serial
from hoplite_mp.client.memory import FOREVER_NS
from hoplite_mp.contributions import PREFIXES, TARGETED, into, is_plain_array, outs_of
from hoplite_mp.leading import MISTAKE
from hoplite_mp.protocol.group_calls import PIECE_BYTES_MAX
from hoplite_mp.protocol.local import GroupCall, GroupWritten
from hoplite_mp.reduction import prefix

if TYPE_CHECKING:
    from hoplite_mp.client.runtime import Runtime
    from hoplite_mp.ref import ObjectRef

__all__ = ["HostsMember", "Interrupted"]

Array = np.ndarray[Any, np.dtype[Any]]
OWN_AT_ROOT = ("broadcast", "gather", "scatter")  # the root gets a value of its own back
FAILURES_MAX = 100  # of one write, by handlers of signals
# Bytes of an array that are copied into the store between two words to the node. Less: the others
# begin earlier. More: fewer words, some 50 us each.
WRITE_ROUND_BYTES = 2 << 20
# Sections begin so much earlier: nodes cut the payload, head and all, at whole elements.
SECTION_OVERLAP_BYTES = 16 << 10
# Copying goes on twice as fast as the fastest of so many latest calls took the bytes, and not below
# twice a gigabit link: as fast as possible, it would take the cores and the memory bandwidth from
# those who send the first bytes.
CALLS_REMEMBERED = 8
# What travels inside one packet to the node: kernels take 416 KiB of one unless they are told more.
PACKET_PARTS_BYTES_MAX = 256 << 10
PACE_BYTES_PER_S_MIN = 250e6


class Interrupted(Exception):
    """A signal's handler has raised its cause while a part was handed over; the part is whole."""


class HostsMember:
    """Gives parts, takes results."""

    def __init__(self, runtime: Runtime, generation: int, rank: int, size: int) -> None:
        self._channel = runtime.channel
        self._cores = runtime.tasks.cores
        self._memory = runtime.memory
        self._generation = generation
        self.rank = rank
        self.size = size
        self._begun, self._written = 0.0, 0  # when the latest call began, bytes that it streamed
        self._rates: deque[float] = deque(maxlen=CALLS_REMEMBERED)  # bytes per second of calls
        self._own: Array | None = None  # a copy of this rank's part of the latest call

    def give(self, call: int, part: tuple[str, str, int, Any]) -> list[ObjectRef[Any]]:
        """Tells the node of (kind, op, root, values); returns what must live until the commit."""
        kind, op, root, values = part
        refs: list[ObjectRef[Any]] = []
        parts: list[bytes | int | tuple[int, int, int]] = []
        writing: list[tuple[int, serial.Encoded]] = []
        mistake, error = "", "value"
        try:
            if kind == MISTAKE:
                mistake, op, error, values = op, "", values, []
            for one in values:
                parts.append(self._part(serial.encode(one), one, parts, refs, writing))
        except BaseException:
            for given in parts:  # blocks that the node has not heard of
                if isinstance(given, tuple):
                    self._memory.client.give_back(given[0])
            raise
        self._channel.tell(
            GroupCall(self._generation, self.rank, call, kind, op, root, parts, mistake, error)
        )
        sections = max(1, self.size - 1 if kind in ("broadcast", "reduce") else self.size)
        self._begun, self._written = time.monotonic(), sum(one.nbytes for _, one in writing)
        interrupted: BaseException | None = None
        for payload, encoded in writing:
            interrupted = self._write(payload, encoded, sections) or interrupted
        if interrupted is not None:
            raise Interrupted from interrupted
        # While the others' parts are on their way: what this rank gets back of its own. A value
        # that is no array it gets from the node like any other: it is to be unpickled anew.
        self._own = None
        mine = kind in ("allgather", "alltoall") or (kind in OWN_AT_ROOT and root == self.rank)
        if values and kind in PREFIXES:
            self._own = values[0]  # the result is another array
        elif values and mine:
            own = values[self.rank if kind in TARGETED else 0]
            self._own = np.array(own) if is_plain_array(own) else None
        return refs

    def _part(
        self,
        encoded: serial.Encoded,
        value: Any,
        parts: list[bytes | int | tuple[int, int, int]],
        refs: list[ObjectRef[Any]],
        writing: list[tuple[int, serial.Encoded]],
    ) -> bytes | int | tuple[int, int, int]:
        """One value as the node takes it, after those parts; `refs`, `writing`: what is left."""
        inside = sum(len(part) for part in parts if isinstance(part, bytes)) + encoded.nbytes
        small = encoded.nbytes <= PIECE_BYTES_MAX and inside <= PACKET_PARTS_BYTES_MAX
        if small and not encoded.refs:
            return encoded.tobytes()
        memory = self._memory
        if (
            not is_plain_array(value)
            # A fold over hosts reorders columns, which needs all of them.
            or (value.flags.f_contiguous and not value.flags.c_contiguous)
            or encoded.nbytes <= memory.config.small_object_bytes_max
        ):
            refs.append(memory.put_encoded(encoded))
            return memory.local_id(refs[-1])
        payload = memory.allocate(encoded.nbytes).detach()
        memory.client.write(payload, encoded.head, [], [])
        if encoded.nbytes > WRITE_ROUND_BYTES:
            writing.append((payload, encoded))
            return payload, encoded.nbytes, encoded.offsets[0]
        memory.client.write(payload, b"", encoded.buffers, encoded.offsets)
        return payload, encoded.nbytes, encoded.nbytes

    def _write(self, payload: int, encoded: serial.Encoded, sections: int) -> BaseException | None:
        """Copies the elements a round at a time, and tells the node. Every round has a part of
        each of the sections, of which the nodes own one each: so all of them begin at once.

        Returns what a signal handler has raised meanwhile: others may be reading, so all is
        written before it is raised. A round is written before it is told, and never again."""
        (buffer,), (offset,) = encoded.buffers, encoded.offsets
        nbytes = buffer.nbytes
        step = max(1, WRITE_ROUND_BYTES // sections)
        bounds = [nbytes * i // sections for i in range(sections + 1)]
        ends = bounds[1:]
        at = [max(0, begin - SECTION_OVERLAP_BYTES) for begin in bounds[:-1]]
        pace = max(PACE_BYTES_PER_S_MIN, 2 * max(self._rates)) if self._rates else 0.0
        due = time.monotonic()
        interrupted: BaseException | None = None
        ranges: list[tuple[int, int]] = []  # written, and not yet told
        failures = 0
        while ranges or any(begin < end for begin, end in zip(at, ends, strict=True)):
            try:
                if not ranges:
                    if pace:
                        time.sleep(max(0.0, due - time.monotonic()))
                        due += step * sections / pace
                    ranges, at = self._round(payload, buffer, offset, at, ends, step)
                self._channel.tell(GroupWritten(payload, ranges))
                ranges = []
            except BaseException as error:
                failures += 1
                if failures > FAILURES_MAX:  # it is no signal
                    raise
                interrupted = error
        return interrupted

    def _round(
        self,
        payload: int,
        buffer: memoryview,
        offset: int,
        at: list[int],
        ends: list[int],
        step: int,
    ) -> tuple[list[tuple[int, int]], list[int]]:
        """Writes the next bytes of each section; (their ranges, where the sections are now)."""
        ranges, now = [], []
        for begin, end in zip(at, ends, strict=True):
            upto = min(begin + step, end)
            if begin < upto:
                self._memory.client.write(payload, b"", [buffer[begin:upto]], [offset + begin])
                ranges.append((offset + begin, offset + upto))
                os.sched_yield()  # what moves the first bytes goes first
            now.append(max(begin, upto))
        return ranges, now

    def finished(self) -> None:
        """The call is committed."""
        if self._written:
            self._rates.append(self._written / (time.monotonic() - self._begun))
            self._written = 0

    def take(self, kind: str, op: str, root: int, data: Any, out: Any) -> Any:
        """What a call returns, out of what the node has made of it."""
        if kind in ("allreduce", "reduce"):
            return self._taken(data[0], out)
        if kind == "reduce_scatter":
            if isinstance(data, dict):
                return self._taken(data[self.rank], out)
            total = serial.decode(memoryview(data[0]), make_ref=self._memory.make_ref)
            return into(np.array_split(total, self.size)[self.rank], out)
        own, self._own = self._own, None
        if kind in ("broadcast", "scatter"):
            if own is not None:
                return own if out is None else into(own, out)
            return self._taken(data[root, self.rank if kind == "scatter" else -1], out)
        if kind in PREFIXES:
            return self._folded(kind, op, own, data, out)
        target = self.rank if kind == "alltoall" else -1
        outs = outs_of(kind, out, self.size)
        gathered: list[Any] = [None] * self.size
        for source in range(self.size):
            if source == self.rank and own is not None:
                gathered[source] = own if outs[source] is None else into(own, outs[source])
            elif (source, target) in data:
                gathered[source] = self._taken(data[source, target], outs[source])
        return gathered

    def _folded(
        self, kind: str, op: str, own: Array | None, data: Any, out: Array | None
    ) -> Array | None:
        """This rank's result of a scan: what the ranks before it give, and for a scan its own."""
        arrays = [self._seen(data[rank, -1]) for rank in range(self.rank) if (rank, -1) in data]
        if kind == "scan":
            assert own is not None, "it has given it"
            arrays.append(own)
        if not arrays:
            return None
        threads = self._memory.config.reduce_threads or self._cores
        total = prefix(op, arrays, threads)
        return total if out is None else into(total, out)

    def _seen(self, given: Any) -> Array:
        """An array that is only read, so it is not copied."""
        memory = self._memory
        if isinstance(given, tuple):
            mem = memoryview(memory.client.block(*given))
        elif isinstance(given, bytes):
            mem = memoryview(given)
        else:
            mem = memory.payload(memory.local_id(given), FOREVER_NS)
        return np.asarray(serial.decode(mem, make_ref=memory.make_ref))

    def _taken(self, given: Any, out: Array | None) -> Any:
        """A value of this process's own, or `out` filled: from a payload, from an object that
        several here read, or from a block that is this process's from now on."""
        if isinstance(given, bytes):
            return self._decoded(memoryview(given), out)
        if not isinstance(given, tuple):
            return self._decoded(
                self._memory.payload(self._memory.local_id(given), FOREVER_NS), out
            )
        payload, nbytes = given
        block: Any = self._memory.client.block(payload, nbytes)
        info = serial.describe_array(memoryview(block)) if out is None else None
        if info is None or serial.payload_kind(memoryview(block)) != serial.ARRAY:
            return self._decoded(memoryview(block), out)
        dtype = serial.named_dtype(info.dtype_name)
        order: Any = info.order
        return np.ndarray(info.shape, dtype, block, info.offset, order=order)

    def _decoded(self, mem: memoryview, out: Array | None) -> Any:
        """`into` copies an array; the buffers of anything else are copied while it is read."""
        array = serial.payload_kind(mem) == serial.ARRAY
        value = serial.decode(mem, make_ref=self._memory.make_ref, writable=not array)
        return into(value, out) if array or out is not None else value
