"""One member's side of Group calls across several hosts.

Members on different hosts share no memory, so each member sends its contribution to its host's
node: small values as bytes, large values as objects or blocks. The node returns the result of the
call as one object.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _serialize, _tasks
from hoplite_mp._client.descriptors import Watched, lift
from hoplite_mp._client.in_place import own_copy
from hoplite_mp._common import clock
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.reduction import DTYPES, OPS, has_kernel, prefix, result_dtype
from hoplite_mp._group.single_host import INVALID_CALL
from hoplite_mp._protocol.group_calls import PIECE_BYTES_MAX
from hoplite_mp._protocol.local import GroupBlockWritten, GroupCall, GroupDoorbell
from hoplite_mp._serialize.contributions import (
    PREFIXES,
    REDUCTIONS,
    TARGETED,
    into,
    is_plain_array,
    outs_of,
    section_bounds,
)
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hoplite_mp import _shm
    from hoplite_mp._client.channel import Channel
    from hoplite_mp._client.in_place import InPlace
    from hoplite_mp._client.runtime import Runtime

__all__ = ["WRITE_ROUND_BYTES", "EngineCalls", "MultiHost", "OverlappedCopy"]

# A large contribution is copied into its block of the store while other hosts read it.
#
# Copying an array takes a considerable share of the transfer time, so the node and the other hosts
# begin to read when the first bytes have been copied.


# Number of bytes that the first round copies into the store before the node is informed. With a
# lower value, other hosts begin earlier. Each later round is twice as large, up to a maximum: the
# copy is ahead of the network by then, and each message takes the node and its engine some 300 us.
# The maximum limits how long a round occupies a core that the sending threads need.
WRITE_ROUND_BYTES = 2 << 20
WRITE_ROUND_BYTES_MAX = 16 << 20
# Sections begin this many bytes earlier, because nodes divide the whole payload, including its
# head, at element boundaries.
SECTION_OVERLAP_BYTES = 16 << 10


class OverlappedCopy:
    """Copies an array's elements from `buffer` into the block, beginning at `offset`. The array is
    divided into sections, and every round copies a piece of each section. Each host in the call
    begins to read at the start of a different section, so all hosts can begin at the same time.

    Invariant: bytes that were reported to the node never change. Where two sections overlap, the
    same values are written twice."""

    def __init__(
        self,
        client: _shm.Client,
        channel: Channel,
        payload: int,
        buffer: memoryview,
        offset: int,
        bounds: Sequence[int],
        pace: float,
        readers: int,
    ) -> None:
        """bounds: the start of each section, and the end of the last one. pace: the maximum speed
        of each reader in bytes per second; 0 if unknown."""
        self.nbytes = buffer.nbytes
        self._client = client
        self._channel = channel
        self._payload = payload
        self._buffer = buffer
        self._offset = offset
        self._ends = bounds[1:]
        self._at = [max(0, begin - SECTION_OVERLAP_BYTES) for begin in bounds[:-1]]
        sections = len(self._ends)
        self._step = max(1, WRITE_ROUND_BYTES // sections)
        self._step_max = max(1, WRITE_ROUND_BYTES_MAX // sections)
        # Pause after a step, in seconds per byte that the step copies in each section.
        self._wait_s = min(sections, readers) / pace if pace else 0.0
        self._due = 0.0
        self._ranges: list[tuple[int, int]] = []  # written, but not yet reported to the node

    def run(self) -> None:
        """Copies all sections."""
        while self._ranges or any(b < e for b, e in zip(self._at, self._ends, strict=True)):
            if not self._ranges:
                if self._wait_s:
                    self._due = self._due or clock.monotonic()
                    clock.sleep(max(0.0, self._due - clock.monotonic()))
                    self._due += self._step * self._wait_s
                self._ranges, self._at = self._round()
                self._step = min(2 * self._step, self._step_max)
            self._channel.tell(GroupBlockWritten(self._payload, self._ranges))
            self._ranges = []

    def _round(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Copies the next bytes of each section. Returns (the ranges copied, the new positions)."""
        ranges, now, offset = [], [], self._offset
        for begin, end in zip(self._at, self._ends, strict=True):
            upto = min(begin + self._step, end)
            if begin < upto:
                self._client.write(self._payload, b"", [self._buffer[begin:upto]], [offset + begin])
                ranges.append((offset + begin, offset + upto))
                os.sched_yield()  # to the threads that send the first bytes
            now.append(max(begin, upto))
        return ranges, now


Array = np.ndarray[Any, np.dtype[Any]]
OWN_AT_ROOT = ("broadcast", "gather", "scatter")  # the root gets a copy of its own value back
# Up to this size, a member requests the block for its next contribution in advance. With a higher
# value, more memory is kept for calls that may never be made. Large calls gain nothing.
PREALLOCATED_BYTES_MAX = 4 << 20
# The copy is limited to twice the speed of the fastest of the last CALLS_REMEMBERED calls, but at
# least PACE_BYTES_PER_S_MIN (two gigabit links). At full speed it would take cores and memory
# bandwidth from the threads that send the first bytes.
CALLS_REMEMBERED = 8
# Maximum number of bytes of values in one packet to the node. By default the kernel accepts packets
# of up to 416 KiB.
PACKET_PARTS_BYTES_MAX = 256 << 10
PACE_BYTES_PER_S_MIN = 250e6


class MultiHost:
    """Passes one member's contributions to its node, and reads the results."""

    def __init__(
        self, runtime: Runtime, board: int, generation: int, rank: int, size: int, in_place: InPlace
    ) -> None:
        self._in_place = in_place
        self.small = EngineCalls(runtime, board, generation, rank, size)
        self._channel = runtime.channel
        self._cores = runtime.tasks.cores
        self._memory = runtime.memory
        self._generation = generation
        self.rank = rank
        self.size = size
        self._begun, self._written = 0.0, 0  # start time and streamed bytes of the latest call
        self._rates: deque[float] = deque(maxlen=CALLS_REMEMBERED)  # bytes per second in past calls
        # This rank's own array in the result of the latest call, and whether it is already a copy.
        self._own: Array | None = None
        self._own_is_copy = False
        # The size of the latest contribution that needed a block, and a block that was allocated in
        # advance for the next contribution of that size.
        self._preallocated: tuple[int, _shm.Lease | None] = 0, None
        self._given = 0  # size of the previous contribution in a block
        # Roots whose last broadcast was large. Their next broadcast is assumed to be large, too; if
        # it is small, the node has to send a request to the leading node.
        self._large_roots: set[int] = set()
        # Blocks in the latest result that an object in this process frees.
        self._adopted: set[int] = set()

    def give(
        self, call: int, part: tuple[str, str, int, Any], lends: bool, gets: bool, held: list[Any]
    ) -> None:
        """Sends the contribution `part` (kind, op, root, values) to the node. Appends to `held` the
        refs that must live until the commit. `lends`: whether arrays in blocks of this process may
        be read in place. `gets`: whether the result needs new arrays."""
        kind, op, root, values = part
        parts: list[bytes | int | tuple[int, int, int]] = []
        leases: list[_shm.Lease] = []  # the leases of the blocks in `parts`
        writing: list[tuple[int, _serialize.Encoded]] = []
        mistake, error = "", "value"
        try:
            if kind == INVALID_CALL:
                mistake, op, error, values = op, "", values, []
            early = [_serialize.encode(one, self._memory.scan, False) for one in values[:1]]
            may_be_small = early or kind != "broadcast" or root not in self._large_roots
            if (
                len(values) <= 1
                and may_be_small
                and self.small.give(call, kind, op, root, early[0] if early else None)
            ):
                self._keep_own(kind, root, values, parts, gets)
                return
            for one in values:
                encoded = early.pop() if early else _serialize.encode(one, self._memory.scan, False)
                ref = self._in_place.ref(one, lends) if is_plain_array(one) else None
                if ref is not None:
                    held.append(ref)
                    parts.append(self._memory.local_id(ref))
                    continue
                parts.append(self._part(encoded, one, parts, held, leases, writing))
            writers = [self._writer(kind, payload, encoded) for payload, encoded in writing]
            ask = GroupCall(
                self._generation, self.rank, call, kind, op, root, parts, mistake, error
            )
        except BaseException:
            leases.clear()  # frees the blocks, which were not reported to the node
            raise
        self._hand_over(ask, leases, writers)
        self._next_block(parts)
        self._keep_own(kind, root, values, parts, gets)

    def _hand_over(
        self, ask: GroupCall, leases: list[_shm.Lease], writers: list[OverlappedCopy]
    ) -> None:
        """Sends the message that passes these blocks to the node, and copies the rest of their
        content. If the message cannot be sent, the blocks are given back."""
        sent: list[int] = []
        try:
            for lease in leases:
                lease.detach()
            self._channel.tell(ask, sent)
        except BaseException:
            if not sent:
                for lease in leases:
                    self._memory.client.give_back(lease.detach())
            raise
        self._begun = clock.monotonic()
        self._written = sum(writer.nbytes for writer in writers)
        for writer in writers:
            writer.run()

    def _keep_own(
        self, kind: str, root: int, values: list[Any], parts: Sequence[Any], gets: bool
    ) -> None:
        """Keeps this rank's own array for the result. Values other than arrays are read from the
        node's result, because they must be unpickled again."""
        self._own, self._own_is_copy = None, False
        in_result = kind in ("allgather", "alltoall") or (kind in OWN_AT_ROOT and root == self.rank)
        at = self.rank if kind in TARGETED else 0
        if values and (kind in PREFIXES or in_result) and is_plain_array(values[at]):
            self._own = values[at]
            # If this rank has written a block, the node returns the block; an `out` is filled at
            # the end. Otherwise the array is copied now, while the other ranks' values are in
            # transit.
            if in_result and gets and not (parts and isinstance(parts[at], tuple)):
                self._own, self._own_is_copy = own_copy(self._memory, values[at]), True

    def _part(
        self,
        encoded: _serialize.Encoded,
        value: Any,
        parts: list[bytes | int | tuple[int, int, int]],
        held: list[Any],
        leases: list[_shm.Lease],
        writing: list[tuple[int, _serialize.Encoded]],
    ) -> bytes | int | tuple[int, int, int]:
        """Returns one value in the form in which it is sent to the node. `parts`: the preceding
        values. Appends to `held` a ref that must live until the commit, to `leases` a block that
        was allocated, and to `writing` a payload that is copied later."""
        inside = sum(len(part) for part in parts if isinstance(part, bytes)) + encoded.nbytes
        small = encoded.nbytes <= PIECE_BYTES_MAX and inside <= PACKET_PARTS_BYTES_MAX
        if small and not encoded.refs:
            return encoded.tobytes()
        memory = self._memory
        if (
            not is_plain_array(value)
            # A fold across several hosts first reorders a column-major array, which requires the
            # complete array.
            or (value.flags.f_contiguous and not value.flags.c_contiguous)
            or encoded.nbytes <= memory.config.small_object_bytes_max
        ):
            held.append(memory.put_encoded(encoded))
            return memory.local_id(held[-1])
        leases.append(self._block(encoded.nbytes))
        payload = leases[-1].payload
        memory.client.write(payload, encoded.head.ljust(encoded.offsets[0], b"\0"), [], [])
        if encoded.nbytes > WRITE_ROUND_BYTES:
            writing.append((payload, encoded))
            return payload, encoded.nbytes, encoded.offsets[0]
        memory.client.write(payload, b"", encoded.buffers, encoded.offsets)
        return payload, encoded.nbytes, encoded.nbytes

    def _block(self, nbytes: int) -> _shm.Lease:
        """A block for a contribution: the preallocated block if its size fits."""
        (before, preallocated), self._preallocated = self._preallocated, (nbytes, None)
        if preallocated is not None and before == nbytes:
            return preallocated
        preallocated = None  # frees this block first, because the allocation may need its space
        return self._memory.allocate(nbytes)

    def _next_block(self, parts: Sequence[Any]) -> None:
        """Requests a block for the next call, which is likely to be similar. The reply takes half a
        millisecond, so the request is sent while this call's bytes are in transit."""
        nbytes, preallocated = self._preallocated
        again, self._given = self._given == nbytes, nbytes
        given = len(parts) == 1 and isinstance(parts[0], tuple) and parts[0][1] == nbytes
        if not given or not again or preallocated is not None or nbytes > PREALLOCATED_BYTES_MAX:
            return
        with contextlib.suppress(HopliteError):  # if the node is gone, the call detects this
            self._preallocated = nbytes, self._memory.preallocate(nbytes)

    def _writer(self, kind: str, payload: int, encoded: _serialize.Encoded) -> OverlappedCopy:
        """The copy of an array's elements that runs after the message to the node."""
        (buffer,), (offset,) = encoded.buffers, encoded.offsets
        bounds = section_bounds(kind, self.size, buffer.nbytes)
        pace = max(PACE_BYTES_PER_S_MIN, 2 * max(self._rates)) if self._rates else 0.0
        return OverlappedCopy(
            self._memory.client, self._channel, payload, buffer, offset, bounds, pace, self.size
        )

    def close(self) -> None:
        """Called when the member has left."""
        self.small.close()
        self._preallocated = 0, None

    def finished(self) -> None:
        """Records the speed of a committed call."""
        self._adopted.clear()
        if self._written:
            self._rates.append(self._written / (clock.monotonic() - self._begun))
            self._written = 0

    def take(self, kind: str, op: str, root: int, data: Any, out: Any) -> Any:
        """The return value of a call. `data`: the node's result."""
        if kind in ("allreduce", "reduce"):
            return self._taken(data[0], out)
        if kind == "reduce_scatter":
            if isinstance(data, dict):
                return self._taken(data[self.rank], out)
            total = self._memory.decode_value(memoryview(data[0]), "the result")
            return into(np.array_split(total, self.size)[self.rank], out)
        own, self._own = self._own, None
        if kind in ("broadcast", "scatter"):
            target = self.rank if kind == "scatter" else -1
            if kind == "broadcast" and isinstance(data.get((root, target)), bytes):
                self._large_roots.discard(root)
            elif kind == "broadcast":
                self._large_roots.add(root)
            if own is not None:
                return self._own_value(own, data.get((root, target)), out)
            return self._taken(data[root, target], out, f"the value of rank {root}")
        if kind in PREFIXES:
            return self._folded(kind, op, own, data, out)
        target = self.rank if kind == "alltoall" else -1
        outs = outs_of(kind, out, self.size)
        if own is not None and any(_overlaps(own, one) for one in outs):
            own = own.copy()  # otherwise another rank's value would overwrite the array
        gathered: list[Any] = [None] * self.size
        for source in range(self.size):
            if source == self.rank and own is not None:
                gathered[source] = self._own_value(own, data.get((source, target)), outs[source])
            elif (source, target) in data:
                given, what = data[source, target], f"the value of rank {source}"
                gathered[source] = self._taken(given, outs[source], what)
        return gathered

    def _own_value(self, own: Array, given: Any, out: Array | None) -> Array:
        """This rank's own value in the result: `out`, filled with the value, or the block that this
        rank has written, or a copy. The node returns the block unless other members on this host
        read it."""
        if isinstance(given, tuple) and out is None:
            return self._taken(given, None)  # type: ignore[no-any-return]
        if isinstance(given, tuple):
            self._adopt(given)  # the block is freed at once, with the returned object
        if out is not None:
            return into(own, out)  # type: ignore[no-any-return]
        return own if self._own_is_copy else own_copy(self._memory, own)

    def _folded(
        self, kind: str, op: str, own: Array | None, data: Any, out: Array | None
    ) -> Array | None:
        """This rank's result of a scan or exscan: the fold of the arrays of all lower ranks and, in
        a scan, its own array."""
        arrays = [self._seen(data[rank, -1]) for rank in range(self.rank) if (rank, -1) in data]
        if kind == "scan":
            assert own is not None, "this rank has contributed an array"
            arrays.append(own)
        if not arrays:
            return None
        threads = self._memory.config.reduce_threads or self._cores
        total = prefix(op, arrays, threads)
        return total if out is None else into(total, out)

    def _seen(self, given: Any) -> Array:
        """A read-only view of another rank's array."""
        memory = self._memory
        if isinstance(given, tuple):
            mem = memoryview(self._adopt(given))
        elif isinstance(given, bytes):
            mem = memoryview(given)
        else:
            mem = memory.payload(memory.local_id(given), FOREVER_NS)
        return np.asarray(memory.decode_value(mem, "the value of another rank"))

    def _adopt(self, given: tuple[int, int, int]) -> Any:
        """Takes over a block in the result that the node has leased to this process. The block is
        freed with the returned object."""
        payload, nbytes, _ = given
        # First, because a signal handler may raise an exception after this line.
        self._adopted.add(payload)
        block: Any = self._memory.client.block(payload, nbytes)
        return block

    def drop(self, data: Any) -> None:
        """Frees this rank's blocks in a result if `take` has raised an error or was not called. The
        result also contains blocks of other ranks on this host."""
        self._own = None
        for one in data.values() if isinstance(data, dict) else data or ():
            if isinstance(one, tuple) and one[2] == self.rank and one[0] not in self._adopted:
                self._adopt(one)
        self._adopted.clear()

    def _taken(self, given: Any, out: Array | None, what: str = "the result") -> Any:
        """A private value, or `out` filled with the value. given: a payload, the ref of an object
        that several members on this host read, or a block that now belongs to this process. what:
        the name of the value in errors."""
        if isinstance(given, bytes):
            return self._decoded(memoryview(given), out, what)
        if not isinstance(given, tuple):
            mem = self._memory.payload(self._memory.local_id(given), FOREVER_NS)
            return self._decoded(mem, out, what)
        block, payload = self._adopt(given), given[0]
        info = _serialize.describe_array(memoryview(block)) if out is None else None
        if info is None or _serialize.payload_kind(memoryview(block)) != _serialize.ARRAY:
            return self._decoded(memoryview(block), out, what)
        block.prefix = info.offset
        self._memory.results.add(payload)
        dtype = _serialize.named_dtype(info.dtype_name)
        order: Any = info.order
        return np.ndarray(info.shape, dtype, block, info.offset, order=order)

    def _decoded(self, mem: memoryview, out: Array | None, what: str) -> Any:
        """Decodes a value. `into` copies an array; the buffers of any other value are copied while
        the value is decoded."""
        array = _serialize.payload_kind(mem) == _serialize.ARRAY
        value = self._memory.decode_value(mem, what, not array)
        return into(value, out) if array or out is not None else value


def _overlaps(own: Array, out: Any) -> bool:
    """Whether filling `out` may change this array."""
    return isinstance(out, np.ndarray) and np.may_share_memory(own, out)


# Small calls across several hosts, which the engines make through the board.
#
# While all members make small calls of the same kind, the engines (compiled threads of the nodes)
# exchange the contributions, and no node runs Python (`cext/engine_coll.h`). A member writes its
# contribution to the board (memory shared with the node), signals the engine through an eventfd
# (its doorbell), and sleeps until the result is on the board. Large calls and other kinds of calls
# are made through the node (`MultiHost`).


NONE = 255  # no operator, no dtype
_KINDS = {kind: number for number, kind in enumerate(_tasks.CALL_KINDS)}


@functools.cache
def _numbers(kind: str, op: str, name: str | None) -> tuple[int, int, int] | None:
    """The engine's numbers for (kind, op, dtype); None if the engine cannot make such a call."""
    if kind not in _KINDS:
        return None
    if kind not in REDUCTIONS:
        return None if op else (_KINDS[kind], NONE, NONE)
    kernel = has_kernel(op, name) if name is not None else None
    if kernel is None or name is None or result_dtype(op, name) != name:
        return None
    return _KINDS[kind], OPS.index(op), DTYPES.index(kernel)


class Doorbell(Watched):
    """An eventfd that is closed with this object."""

    __slots__ = ()

    def close(self) -> None:
        super().close()
        self.fd = -1  # `there` cannot distinguish one eventfd from another

    def __del__(self) -> None:
        self.close()


class EngineCalls:
    """One member's slot on the board, and its doorbell."""

    def __init__(self, runtime: Runtime, board: int, generation: int, rank: int, size: int) -> None:
        self._channel = runtime.channel
        self._board = _tasks.CollectiveBoard(runtime.tasks, board)
        self._generation = generation
        self._rank = rank
        self._size = size
        self._doorbell: Doorbell | None = None

    def give(
        self, call: int, kind: str, op: str, root: int, encoded: _serialize.Encoded | None
    ) -> bool:
        """Contributes this rank's payload to a call. encoded: None if this rank has no payload.
        Returns False if the call must be made through the node."""
        if not self._board.is_open():
            return False
        head, offset, elements = b"", 0, None
        name = None
        if encoded is not None:
            if encoded.refs or encoded.nbytes > PIECE_BYTES_MAX:
                return False
            if kind in REDUCTIONS:
                info = _serialize.describe_array(memoryview(encoded.head))
                if (
                    info is None
                    or info.order != "C"
                    or (kind == "reduce_scatter" and not info.shape)
                ):
                    return False
                name = info.dtype_name
            if len(encoded.buffers) == 1:
                head, offset, elements = encoded.head, encoded.offsets[0], encoded.buffers[0]
            else:
                head = encoded.tobytes()
        numbers = _numbers(kind, op, name)
        if numbers is None or (self._doorbell is None and not self._hang_doorbell()):
            return False
        about = *numbers, root
        if not self._board.give(self._rank, self._size, call, about, head, offset, elements):
            return False
        self.ring()
        return True

    def ring(self) -> None:
        """Wakes the engine, which then reads the board."""
        doorbell = self._doorbell
        if doorbell is not None and doorbell.there():
            os.eventfd_write(doorbell.fd, 1)
        elif self._hang_doorbell():  # a new doorbell makes the engine read the board
            return

    def _hang_doorbell(self) -> bool:
        try:
            fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:  # too many open descriptors
            return False
        doorbell = Doorbell(lift(fd))
        self._channel.call(GroupDoorbell(self._generation, self._rank), descriptors=[doorbell.fd])
        self._doorbell = doorbell  # last, because the line above may be interrupted
        return True

    def is_done(self, call: int) -> bool:
        """Whether the engine has committed that call."""
        return self._board.done() > call

    def result(self) -> tuple[int, str, str, Any]:
        """The result of the last call, in the same form as the node's results: (a mask of the
        contributors, the error's kind or "", its message or "", data)."""
        _, mask, kind, _, _, _, found = _tasks.read_record(self._board.record())
        if _tasks.CALL_KINDS[kind] in REDUCTIONS:
            return mask, "", "", list(found.values())
        return mask, "", "", {(source, -1): part for source, part in found.items()}

    def close(self) -> None:
        """Called when the member has left."""
        if self._doorbell is not None:
            self._doorbell.close()
            self._doorbell = None
