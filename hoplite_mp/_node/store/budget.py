"""The store's budget: leases of blocks and spans, limits, freeing, spilling.

The kernel does not free shared memory when one of its users dies, so one process must keep track of
all allocations. A block contains one big object; a span is filled with small objects by one client.
Before the store grows, the `memory=` limit, MemAvailable and the limits of every enclosing control
group are checked. When memory is short, the store first frees objects that are kept only for
reconstruction (lineage), objects without a holder, and returned blocks. Then it revokes empty
spans, returns unused resident pages to the system, and finally spills the least recently used
unpinned objects.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Protocol

from hoplite_mp import _shm
from hoplite_mp._common.arena import Arena
from hoplite_mp._common.machine_limits import available_bytes, format_bytes, total_bytes
from hoplite_mp._common.object_states import FLAG_INLINE, NODE_SLOT, STATE
from hoplite_mp._node.io.processes import file_bytes, resident_bytes, yield_core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hoplite_mp._node.ports import Disk, LoopPort
    from hoplite_mp._node.trace_events import TraceEvents
    from hoplite_mp.config import Config

    Candidate = tuple[int, int, int, int]  # time of the last use, object id, payload offset, bytes

__all__ = ["Pages", "Store"]


ADOPTED = -1  # in place of a slot: the lessee is dead
PROMISED = -2  # in place of a slot: a reserved block (see groups/group_results.py)
LEASED = (1 << 64) - 1  # owner word of a leased block without an object
HEAD = _shm.BLOCK_HEAD_BYTES
# Spill in batches of 1/32 of the store's limit. Smaller batches: fewer objects are spilled
# unnecessarily. Larger: more objects share the cost of one scan of all headers.
SPILL_BATCHES = 32
# An object that was restored for a reader is not spilled again for this long, so that the reader
# has time to pin it. Otherwise readers of more objects than fit in memory would displace each
# other's objects indefinitely. Longer: the memory stays occupied longer if the reader has died.
HANDED_S = 0.02
ERROR_SHARE = 16  # the reserve for errors is at most 1/16 of the limit
# The spill file is purged when the number of writes since the last purge exceeds 1/16 of the number
# of spilled objects.
PURGE_SHARE = 16
SPILL_AGAIN_S = 1.0  # no spilling for this long after a failed write to the disk


class StoreEvents(Protocol):
    """Requests from this component to the components above it."""

    def restore_elsewhere(self, oid: int) -> bool | None:
        """Fetches an object whose bytes may be on another host. Returns None if the object is being
        fetched or memory is short, and False if it is gone."""

    def unreadable(self, oid: int, why: str) -> None:
        """Replaces a spilled object with an error, because its bytes cannot be read from the
        disk."""

    def drop_unneeded(self) -> None:
        """Drops the bytes of results that only lineage keeps and that can be reconstructed."""


class Store:
    """The leases of the store's memory, and the amount of memory in use."""

    def __init__(
        self,
        client: _shm.NodeClient,
        config: Config,
        limit: int,
        store_fd: int,
        loop: LoopPort,
        disk: Disk,
        trace_events: TraceEvents,
        events: StoreEvents,
    ) -> None:
        self.client = client
        self.events = events
        self.loop = loop
        self.config = config
        self.limit = limit
        self.store_fd = store_fd
        self.arena = Arena(file_bytes(store_fd))
        # Small hosts and control groups leave less memory to other programs.
        self.reserve_bytes = min(config.memory_reserve_bytes, total_bytes() // 8)
        self.leases: dict[int, int] = {}  # payload offset of a big block -> lessee's slot
        self.errors: set[int] = set()  # blocks in the reserve for errors
        self.spans: dict[int, int] = {}  # span offset -> lessee's slot, or ADOPTED
        self.trace_events = trace_events
        self.spill = disk
        self.spilled: dict[int, tuple[int, int]] = {}  # oid -> (position, bytes)
        # restored oid -> time at which it may be spilled again
        self._handed: dict[int, float] = {}
        self.spill_error = ""  # reason why the last write to the disk failed
        self._spill_again = 0.0
        self._writes = 0  # number of writes to the spill file since it was purged
        # Slot of the client whose small objects the last allocation spilled, or NODE_SLOT.
        self.returned_to = NODE_SLOT
        self.ahead = 0  # bytes in ranges that `reserve` has returned and `release` has not freed
        self.call_buffer_bytes = 0  # bytes leased for call buffers of Groups, until the Groups end
        self.clients: Iterable[int] = ()  # slots of processes that may request spans
        self.promised = 0  # bytes reserved for clients other than the one being served

    # -- leasing -------------------------------------------------------------------------------

    def lease(self, nbytes: int, slot: int, preallocated: bool = False) -> int | None:
        """Leases a big block. Returns its payload offset, or None if memory is short. preallocated:
        the block may never be needed, so it must not take memory from others."""
        self.take_returns()
        if (start := self._allocate(nbytes + HEAD, 4096, slot, preallocated)) is None:
            return None
        payload = self.client.lease(start, self.arena.size_of(start))
        self.leases[payload] = slot
        return payload

    def has_spare(self, nbytes: int) -> bool:
        """Whether a block that may never be needed fits, with at least as much memory left over."""
        if self.used_bytes() + nbytes > self.limit // 2:
            return False
        # A range whose pages are already resident takes no memory from others. This is checked
        # first, because `fits` reads the available memory from several files.
        return not self.arena.growth(nbytes + HEAD) or self.fits(2 * nbytes, 4096)

    def lease_error(self, nbytes: int, slot: int) -> int | None:
        """Leases a block for an error: within the limit if possible, else from the reserve beyond
        the limit. Returns the payload offset, or None if memory is short."""
        payload = self.lease(nbytes, slot)
        if payload is not None:
            return payload
        reserve = min(self.config.error_reserve_bytes, self.limit // ERROR_SHARE)
        left = reserve - sum(map(self.size_of, self.errors))
        if nbytes > left or (start := self.arena.allocate(nbytes + HEAD, 4096)) is None:
            return None
        payload = self.client.lease(start, self.arena.size_of(start))
        self.leases[payload] = slot
        self.errors.add(payload)
        return payload

    def size_of(self, payload: int) -> int:
        """The size of a leased big block, in bytes."""
        return self.arena.size_of(payload - HEAD) - HEAD

    def lease_span(self, slot: int) -> int | None:
        """Leases a span for small objects, aligned to its size. Returns None if memory is short."""
        size = self.config.span_bytes
        self.take_returns()
        lessees = set(self.spans.values())
        # Clients without a span cannot store any small object. One span is therefore reserved for
        # each of them before a client gets a second span. The small objects of a client with a span
        # can be spilled instead.
        self.promised = 0
        if slot in lessees:
            self.promised = size * sum(client not in lessees for client in self.clients)
        start = self._allocate(size, size, slot)
        self.promised = 0
        if start is not None:
            self.spans[start] = slot
            self.client.lease_span(start)
        return start

    def lease_first_span(self, slot: int) -> None:
        """Records the first span, which the driver uses before the node starts."""
        size = self.config.span_bytes
        start = self.arena.allocate(size, size)
        assert start == size, start
        self.spans[start] = slot

    def _allocate(
        self, nbytes: int, align: int, slot: int, preallocated: bool = False
    ) -> int | None:
        self.returned_to = NODE_SLOT
        if not self.fits(nbytes, align) and (
            preallocated or not self._free_memory(nbytes, align, slot)
        ):
            return None
        if (start := self.arena.allocate(nbytes, align)) is None and not preallocated:
            self.events.drop_unneeded()  # no free range is long enough for this request
        return start

    def fits(self, nbytes: int, align: int) -> bool:
        """Whether the bytes fit without freeing or spilling any object."""
        if self.arena.used + nbytes + self.promised > self.limit:
            return False
        growth = self.arena.growth(nbytes, align)
        over = self.arena.resident + growth - self.limit
        if over > 0:
            self._cool(over)
            growth = self.arena.growth(nbytes, align)  # `_cool` may have raised it
            if self.arena.resident + growth > self.limit:
                return False
        # Spans may use most of the reserve, because a worker without a span cannot report errors.
        reserve = self.reserve_bytes if align < self.config.span_bytes else self.reserve_bytes // 4
        return not growth or growth + self._untouched() + reserve <= available_bytes()

    def _untouched(self) -> int:
        """The number of bytes that count as resident but whose pages have not been touched."""
        return max(0, self.arena.resident - resident_bytes(self.store_fd))

    def _free_memory(self, nbytes: int, align: int, slot: int) -> bool:
        self.events.drop_unneeded()
        self.client.reclaim_freed()
        self.take_returns()
        self.sweep_spans()
        if self.fits(nbytes, align):
            return True
        self.revoke_spans(lambda: self.fits(nbytes, align))
        if self.fits(nbytes, align):
            return True
        self._cool(nbytes)
        if self.fits(nbytes, align):
            return True
        self._spill_until(nbytes, align, slot)
        return self.fits(nbytes, align)

    def _cool(self, nbytes: int) -> None:
        for start, size in self.arena.cool(nbytes):
            self.client.remove(start, size)

    def impossible(self, nbytes: int) -> bool:
        return nbytes + HEAD > self.limit

    # -- freeing -------------------------------------------------------------------------------

    def take_returns(self) -> None:
        """Frees the blocks that clients have returned by clearing the owner word."""
        returned = self.client.returns()
        for payload in list(self.leases) if returned is None else returned:
            promised = self.leases.get(payload, PROMISED) == PROMISED
            if not promised and self.client.block_owner(payload) == 0:
                self.free(payload)

    def free(self, payload: int) -> None:
        del self.leases[payload]
        self.errors.discard(payload)
        self.arena.free(payload - HEAD)

    def free_unused(self, payload: int, slot: int) -> None:
        """Frees a block that was leased to the slot, if no object is bound to it."""
        if self.leases.get(payload) == slot and self.client.block_owner(payload) == LEASED:
            self.free(payload)

    def give_span(self, offset: int, slot: int) -> None:
        if self.spans.get(offset) == slot:
            del self.spans[offset]
            self.arena.free(offset)

    def orphan(self, slot: int) -> None:
        """Frees the blocks of a dead client that contain no live object, and adopts its spans."""
        live = self.client.live_blocks()
        for payload, lessee in list(self.leases.items()):
            if lessee == slot:
                owner = self.client.block_owner(payload)
                if owner in (0, LEASED) or live.get(payload) != owner:
                    self.free(payload)
                else:
                    self.leases[payload] = NODE_SLOT
        for offset, lessee in list(self.spans.items()):
            if lessee == slot:
                self.spans[offset] = ADOPTED
        self.sweep_spans(live)

    def sweep_spans(self, live: dict[int, int] | None = None) -> None:
        """Frees adopted spans without a live object."""
        adopted = [offset for offset, lessee in self.spans.items() if lessee == ADOPTED]
        if not adopted:
            return
        size = self.config.span_bytes
        used = {payload & -size for payload in (live or self.client.live_blocks())}
        for offset in adopted:
            if offset not in used:
                del self.spans[offset]
                self.arena.free(offset)

    def revoke_spans(self, enough: Callable[[], bool]) -> None:
        """Takes empty spans from living clients until `enough` returns True. An idle client does
        not return its spans itself."""
        for offset, lessee in list(self.spans.items()):
            if lessee != ADOPTED and self.client.revoke_span(offset):
                del self.spans[offset]
                self.arena.free(offset)
                if enough():
                    return

    def reserve(self, nbytes: int) -> int | None:
        """Reserves a range whose pages will be touched ahead of demand. Returns its offset, or None
        if memory is short."""
        if not self.fits(nbytes, 4096):
            return None
        self.ahead += nbytes
        return self.arena.allocate(nbytes, 4096)

    def release(self, start: int) -> None:
        """Frees a range from `reserve`, whose pages are now warm."""
        self.ahead -= self.arena.size_of(start)
        self.arena.free(start)

    def used_bytes(self) -> int:
        """The number of bytes in big blocks and spans."""
        return self.arena.used - self.ahead

    # -- spilling ------------------------------------------------------------------------------

    def _spill_until(self, nbytes: int, align: int, slot: int) -> None:
        """Spills until the bytes fit, and then completes a batch, so that the next requests need
        not repeat the search for the least recently used objects, which scans all headers."""
        size = self.config.span_bytes
        # Spilling a single small object only frees memory inside its span. That helps only the
        # lessee of the span, and only if it has requested a span. Other requests need whole free
        # spans. Big objects are spilled before whole spans, because fewer of them free the same
        # number of bytes.
        own = {offset for offset, lessee in self.spans.items() if lessee == slot and align >= size}
        others: dict[int, list[Candidate]] = {}
        small = spilled = 0
        batch, enough = self.limit // SPILL_BATCHES, False
        now = self.loop.now()
        self._handed = {oid: until for oid, until in self._handed.items() if until > now}
        candidates = sorted(c for c in self.client.spill_candidates() if c[1] not in self._handed)
        for candidate in candidates:
            if (enough and spilled >= batch) or self.loop.now() < self._spill_again:
                return
            _, oid, payload, length = candidate
            big = payload in self.leases
            span = payload & -size
            if not big and span not in own:
                others.setdefault(span, []).append(candidate)
                continue
            if not big and (enough or small >= max(size, nbytes)):
                continue
            if not self.spill_one(oid, payload, length):
                continue
            spilled += length
            if big:
                self.take_returns()
            else:
                small += length
                self.returned_to = slot
            enough = enough or self.fits(nbytes, align)
        if not enough and not small:
            count = len(candidates) // SPILL_BATCHES
            self._empty_spans(others, lambda: self.fits(nbytes, align), count)

    def _empty_spans(
        self, found: dict[int, list[Candidate]], enough: Callable[[], bool], count: int
    ) -> None:
        """Spills all objects in a span and takes the span from its lessee. Repeats this, starting
        with the least recently used span, until there is enough memory and `count` objects have
        been spilled."""
        used = Counter(payload & -self.config.span_bytes for payload in self.client.live_blocks())
        done = 0
        for offset, inside in sorted(found.items(), key=lambda item: item[1][-1][0]):
            if used[offset] != len(inside):
                continue  # an object in the span is pinned or is an error
            if self.loop.now() < self._spill_again or (done >= count and enough()):
                return
            done += len(inside)
            if all(self.spill_one(oid, payload, length) for _, oid, payload, length in inside):
                lessee = self.spans.get(offset)
                if lessee == ADOPTED or (lessee is not None and self.client.revoke_span(offset)):
                    del self.spans[offset]
                    self.arena.free(offset)

    def spill_one(self, oid: int, payload: int, nbytes: int) -> bool:
        """Moves one object to the spill file. Returns False if it is pinned or the write fails."""
        if not self.client.spill_begin(oid):
            return False
        begun = self.loop.now_ns() if self.trace_events.on else 0
        position = self._write(self.client.memory(payload, nbytes))
        if position is None:
            self.client.spill_abort(oid)
            return False
        self.spilled[oid] = (position, nbytes)
        self.client.spill_end(oid, position)
        self.trace_events.add("spill", "spill", begun, object=oid, bytes=nbytes)
        return True

    def _write(self, data: memoryview) -> int | None:
        """Writes to the spill file. Returns the position. If the write fails, sets `spill_error`
        and returns None."""
        self._writes += 1
        if self._writes > len(self.spilled) // PURGE_SHARE:
            self.purge_spilled()
        for purged in (self._writes == 0, True):
            try:
                position = self.spill.write(data)
            except OSError as error:
                if purged:
                    self.spill_error = f"the disk cannot be written: {error}"
                    self._spill_again = self.loop.now() + SPILL_AGAIN_S
                    return None
            else:
                if position is not None or purged:
                    self.spill_error = "" if position is not None else "spill_bytes_max is reached"
                    return position
            self.purge_spilled()
        return None

    def restore(self, oid: int, slot: int = NODE_SLOT) -> bool | None:
        """Restores a spilled object for the process in the slot. Returns None if memory is short,
        and False if the object is gone."""
        if oid not in self.spilled or self.client.state(oid) != STATE["SPILLED"]:
            return self.events.restore_elsewhere(oid)
        position, nbytes = self.spilled[oid]
        payload = self.lease(nbytes, slot)
        if payload is None:
            return None
        begun = self.loop.now_ns() if self.trace_events.on else 0
        self.leases[payload] = NODE_SLOT
        try:
            self.spill.read(position, self.client.memory(payload, nbytes))
        except OSError as error:
            self.free(payload)
            self._unreadable(oid, error)
            return False
        if self.client.restore(oid, payload):
            self.spill.free(position)
            del self.spilled[oid]
            if slot != NODE_SLOT:
                self._handed[oid] = self.loop.now() + HANDED_S
            self.trace_events.add("spill", "restore", begun, object=oid, bytes=nbytes)
            return True
        self.free(payload)
        return False

    def spilled_bytes(self, oid: int) -> bytes | None:
        """The payload of a spilled object, or None if it is not in the spill file."""
        return self.read_spilled(oid, 0, self.spilled[oid][1]) if oid in self.spilled else None

    def read_spilled(self, oid: int, offset: int, nbytes: int) -> bytes | None:
        """A range of a spilled object's payload, or None if it cannot be read."""
        if oid not in self.spilled or self.client.state(oid) != STATE["SPILLED"]:
            return None
        position, whole = self.spilled[oid]
        data = bytearray(max(0, min(nbytes, whole - offset)))
        try:
            self.spill.read(position + offset, memoryview(data))
        except OSError as error:
            self._unreadable(oid, error)
            return None
        return bytes(data)

    def _unreadable(self, oid: int, error: OSError) -> None:
        self.events.unreadable(oid, f"its bytes cannot be read from the disk: {error}")
        self.spill.free(self.spilled.pop(oid)[0])

    def forget_spilled(self, oid: int) -> bool:
        """Frees an object's bytes in the spill file. Returns False if the object is not there."""
        if oid not in self.spilled or self.client.state(oid) != STATE["SPILLED"]:
            return False
        self.spill.free(self.spilled.pop(oid)[0])
        return True

    def purge_spilled(self) -> None:
        """Frees the spill file's copies of objects that are no longer spilled."""
        self._writes = 0
        for oid, (position, _) in list(self.spilled.items()):
            if self.client.state(oid) != STATE["SPILLED"]:
                self.spill.free(position)
                del self.spilled[oid]

    # -- giving memory back --------------------------------------------------------------------

    def give_unneeded_back(self) -> bool:
        """Returns to the system the resident pages that have not been needed since the previous
        call. Returns whether any page is still resident."""
        self.client.reclaim_freed()
        self.take_returns()
        self.purge_spilled()
        self.revoke_spans(lambda: False)
        for start, size in self.arena.cool_unneeded():
            self.client.remove(start, size)
        return self.arena.resident > 0

    # -- messages for users --------------------------------------------------------------------

    def usage_message(self) -> str:
        """The fill level of the store as text, determined without a scan of all objects."""
        used = f"store of h{self.client.number} holds {format_bytes(self.arena.used)}"
        return f"{used} of {format_bytes(self.limit)}"

    def never_message(self) -> str:
        """The error text for an object that can never fit."""
        limit = format_bytes(self.limit)
        return (
            f"that is larger than the whole store of h{self.client.number} ({limit}): raise memory="
        )

    def full_message(self) -> str:
        """The text of StoreFullError: why memory is short, and how much memory each process
        pins."""
        pinned: dict[int, int] = {}
        queued = small = 0
        for header in self.client.scan():
            if not header["block"] or header["flags"] & FLAG_INLINE:
                continue
            small += header["size"] * (header["block"] not in self.leases)
            if header["pins"]:
                slot = header["pins"][0]
                pinned[slot] = pinned.get(slot, 0) + header["size"]
            elif header["refs"]:
                queued += header["size"]
        parts = []
        for slot, nbytes in sorted(pinned.items(), key=lambda item: -item[1])[:4]:
            if slot == NODE_SLOT:
                parts.append(f"{format_bytes(nbytes)} held by running reductions")
                continue
            pid = self.client.client_info(slot)["pid"]
            parts.append(f"{format_bytes(nbytes)} pinned by arrays in process {pid}")
        if queued:
            parts.append(f"{format_bytes(queued)} held by refs and queued tasks")
        if self.call_buffer_bytes:
            parts.append(
                f"{format_bytes(self.call_buffer_bytes)} in call buffers of Groups, which "
                "Config(group_buffer_bytes_max=) limits"
            )
        spans = len(self.spans) * self.config.span_bytes
        if small < spans // 2 and spans > self.limit // 4:
            parts.append(f"{format_bytes(spans - small)} free between small objects")
        free = available_bytes()
        if self.arena.used < self.limit // 2 and free < 2 * self.config.memory_reserve_bytes:
            parts.append(f"only {format_bytes(free)} of the host's memory is available")
        if self.spill_error:
            parts.append(self.spill_error)
        detail = f" ({', '.join(parts)})" if parts else ""
        return f"{self.usage_message()}{detail}. Free arrays, or raise memory=."


# The store's pages: touched before the first large objects need them, and returned to the system
# after a long idle time.
#
# The first write to a fresh page is slow, because it causes a page fault and the kernel must zero
# the page. Unused pages should be available to other programs.


# Delay after the start of the host, so that its workers start first. Higher: large objects may be
# written before the pages have been touched.
POPULATE_DELAY_S = 0.3
# The number of bytes in one system call. Between the calls other threads can acquire the lock of
# the address space.
POPULATE_STEP_BYTES = 2 << 20
IDLE_POLL_S = 0.1  # minimum interval of checks, even if memory_idle_s is shorter


class Pages:
    """The pages of one node's store."""

    def __init__(
        self, config: Config, loop: LoopPort, client: _shm.NodeClient, store: Store, workers: int
    ) -> None:
        """workers: the number of workers at the start of the host."""
        self.config = config
        self.loop = loop
        self.client = client
        self.store = store
        self.workers = workers
        self._watching = False

    def begin(self) -> None:
        """Schedules the touching of pages. Called at the start of the host."""
        if self.config.populate_ahead_bytes and self.workers:
            self.loop.call_later(POPULATE_DELAY_S, self._populate)

    def _populate(self) -> None:
        """Touches pages in a thread, which yields between steps."""
        wanted = min(self.config.populate_ahead_bytes, self.store.limit // 4) & -4096
        start = self.store.reserve(wanted) if wanted else None
        if start is None:
            return

        def work() -> None:
            for offset in range(start, start + wanted, POPULATE_STEP_BYTES):
                self.client.populate(offset, min(POPULATE_STEP_BYTES, start + wanted - offset))
                yield_core()

        def done(_: None) -> None:
            self.store.release(start)
            self.watch_idle()

        self.loop.run_in_thread(work, done)

    def watch_idle(self) -> None:
        """Starts checking every memory_idle_s for pages that have not been needed since the
        previous check. Called when the store has grown."""
        if not self._watching:
            self._watching = True
            self._check_later()

    def _check_later(self) -> None:
        self.loop.call_later(max(IDLE_POLL_S, self.config.memory_idle_s), self._give_back)

    def _give_back(self) -> None:
        self._watching = self.store.give_unneeded_back()
        if self._watching:
            self._check_later()
