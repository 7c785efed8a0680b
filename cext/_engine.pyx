"""The streaming engine for Python: takes numbers and buffers, returns events; everything else is C.

`engine_state.h` describes the engine. This file checks what C cannot check, holds the buffers of
cells while the engine's thread may touch them, and translates numbers into structures. Unknown
numbers never reach C.

Every lookup and the post that follows are one step, because methods run in the engine's critical
section (with a GIL the section compiles to nothing). The thread executes posts in order, so no post
can refer to something that an earlier one has freed.

It imports nothing of hoplite_mp, and raises only builtin errors.
"""

from cpython.buffer cimport (PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
                             PyObject_GetBuffer)
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrno
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.errno cimport errno
from libc.stdint cimport UINT32_MAX, UINT64_MAX, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

cimport cython


include "shm_play.pxi"
include "engine_declarations.pxi"


cdef tuple OPS = tuple([reduce_op_names[i].decode() for i in range(REDUCE_OP_COUNT)])
cdef tuple DTYPES = tuple([reduce_dtype_names[i].decode() for i in range(REDUCE_DTYPE_COUNT)])

FILLED = EVENT_FILLED
PULL_FAILED = EVENT_PULL_FAILED
FOLD_FAILED = EVENT_FOLD_FAILED
CLOSED = EVENT_CLOSED
LINK_LOST = EVENT_LINK_LOST
COLL_TAKEN = EVENT_COLL_TAKEN
COLL_PART = EVENT_COLL_PART
COLL_FIRST = EVENT_COLL_FIRST
COLL_SEND = EVENT_COLL_SEND
COLL_MOVED = EVENT_COLL_MOVED
HEADER_BYTES = FRAME_BYTES
BLOCK_BYTES_LEAST = BLOCK_BYTES_MIN
BLOCK_BYTES_MOST = FRAME_BLOCK_BYTES_MAX
PULLS_MAX = LINK_PULLS_MAX

cdef int fork_count = 0  # a forked child has no engine thread, and the lock may be held


cdef void after_fork_in_child() noexcept nogil:
    global fork_count
    fork_count += 1


pthread_atfork(NULL, NULL, after_fork_in_child)


include "engine_kernels.pxi"


include "engine_held.pxi"
include "engine_coll.pxi"


# Without cyclic collection, which would clear the dictionaries of an engine in a cycle, with the
# buffers in them, while the thread is still running. Reference counts end it in order.
@cython.no_gc
@cython.final
cdef class Engine(_EngineCalls):
    """Streams between this process and others, in its own thread without the GIL.

    `incarnation` (1 .. 2**64 - 1) is in every frame that it sends. A block has at most
    `block_bytes_max` bytes (16 KiB .. 1 MiB): larger blocks delay streams that share a link,
    smaller ones cost system calls. Up to `waiting_requests_max` requests for missing keys may wait
    on each link, about 100 bytes each; further requests are refused. Raises OSError without free
    descriptors.

    `threaded` False: without a thread or descriptors. step() does the work, and all links are
    driven. A simulation runs many such engines in one thread.
    """

    cdef int descriptor
    cdef uint64_t last_number
    cdef dict held   # number -> _Held, until CLOSED was taken
    cdef dict keys   # key -> number of the open cell that has it
    cdef dict joined  # number -> _Joined, until LINK_LOST was taken

    def __init__(self, incarnation: int, block_bytes_max: int = 262144,
                 waiting_requests_max: int = 16384, threaded: bool = True) -> None:
        if self.engine != NULL:
            raise RuntimeError("the engine was already initialised")
        self.held, self.keys, self.joined = {}, {}, {}
        self.fork_mark = fork_count
        if not 1 <= incarnation <= UINT64_MAX:
            raise ValueError(f"incarnation must be from 1 to 2**64 - 1, not {incarnation}")
        if not BLOCK_BYTES_MIN <= block_bytes_max <= FRAME_BLOCK_BYTES_MAX or block_bytes_max % 64:
            raise ValueError(f"block_bytes_max must be a multiple of 64 from {BLOCK_BYTES_MIN} to "
                             f"{FRAME_BLOCK_BYTES_MAX}, not {block_bytes_max}")
        if not 0 <= waiting_requests_max <= LINK_PULLS_MAX:
            raise ValueError(f"waiting_requests_max must be from 0 to {LINK_PULLS_MAX}, "
                             f"not {waiting_requests_max}")
        self.engine = engine_new(incarnation, block_bytes_max, waiting_requests_max, threaded)
        if self.engine == NULL:
            PyErr_SetFromErrno(OSError)
        self.descriptor = self.engine.event_fd

    def __dealloc__(self):
        if self.engine != NULL and self.fork_mark == fork_count:
            self.end()

    cdef void end(self) noexcept:
        cdef engine_t *engine = self.engine
        cdef _Held held
        for held in self.held.values():
            if held.open:
                engine_post(engine, COMMAND_CLOSE, held.cell, NULL, NULL, NULL, 0)
        self.engine = NULL
        with nogil:
            engine_stop(engine)
        self.held.clear()
        self.keys.clear()
        self.joined.clear()

    cdef _Held open_cell(self, object number):
        cdef _Held held = self.held.get(number)
        if held is None or not held.open:
            raise KeyError(f"no open cell {number}")
        return held

    cdef _Joined open_link(self, object number):
        cdef _Joined joined = self.joined.get(number)
        if joined is None:
            raise KeyError(f"no link {number}")
        return joined

    cdef void post(self, int kind, cell_t *cell, link_t *link) noexcept:
        engine_post(self.engine, kind, cell, link, NULL, NULL, 0)

    cdef uint64_t next_number(self) noexcept:
        self.last_number += 1
        return self.last_number

    def step(self) -> bool:
        """Executes all posted commands. Returns whether events() has an event that must not be
        delayed; see is_quiet()."""
        self.check()
        if self.engine.threaded:
            raise RuntimeError("step() is for engines without a thread")
        while engine_step(self.engine):
            pass
        return self.engine.signalled

    def fileno(self) -> int:
        """Readable while events() has events. Owned by the engine: never close it. -1: no
        thread."""
        self.check()
        return self.descriptor

    # ---- Links ----

    @cython.critical_section
    def connect(self, fd: int, peer: int, checksum: bool = True,
                peer_incarnation: int = 0) -> int:
        """A link over a connected, authenticated stream socket; returns its number.

        The descriptor is duplicated: close yours, and no longer read or write it. Both sides must
        agree on `checksum` (of blocks; headers always have one). `peer` (64 bits) is returned in
        LINK_LOST. Frames of another incarnation than `peer_incarnation` end the link; 0: than that
        of the first frame. Raises OSError if it is not a connected stream socket.
        """
        self.check()
        if not self.engine.threaded:
            raise RuntimeError("an engine without a thread has no sockets: use drive()")
        cdef uint64_t peer_word = peer
        cdef uint64_t incarnation = peer_incarnation
        cdef int descriptor = fd
        cdef const char *fault
        cdef _Joined joined = _Joined()
        cdef uint64_t number = self.next_number()
        joined.link = link_new(number, peer_word, incarnation, False, checksum)
        fault = socket_take(joined.link, descriptor)
        if fault != NULL:
            reason = OSError(errno, fault.decode())
            link_free(joined.link)
            raise reason
        self.joined[number] = joined
        self.post(COMMAND_CONNECT, NULL, joined.link)
        return number

    @cython.critical_section
    def drive(self, peer: int, peer_incarnation: int = 0) -> Driver:
        """A link over TLS, whose bytes Python threads move: see Driver. Without checksums of
        blocks."""
        self.check()
        cdef uint64_t peer_word = peer
        cdef uint64_t incarnation = peer_incarnation
        cdef _Joined joined = _Joined()
        cdef uint64_t number = self.next_number()
        joined.link = link_new(number, peer_word, incarnation, True, False)
        joined.driven = True
        self.joined[number] = joined
        self.post(COMMAND_CONNECT, NULL, joined.link)
        return new_driver(self, joined, number)

    @cython.critical_section
    def disconnect(self, link: int) -> None:
        """Ends a link. LINK_LOST follows, and PULL_FAILED for each pull over it."""
        self.check()
        cdef _Joined joined = self.open_link(link)
        self.post(COMMAND_DISCONNECT, NULL, joined.link)

    @cython.critical_section
    def counters(self, link: int) -> tuple[int, int, int, int]:
        """(bytes sent, bytes received, backlogged bytes, backlogged nanoseconds), never decreasing.

        Backlogged: bytes sent, and time passed, while the socket was full. The quotient of two
        differences is the rate of the link.
        """
        self.check()
        cdef link_t *at = self.open_link(link).link
        return (atomic_load_explicit(&at.bytes_sent, memory_order_acquire),
                atomic_load_explicit(&at.bytes_received, memory_order_acquire),
                atomic_load_explicit(&at.backlogged_bytes, memory_order_acquire),
                atomic_load_explicit(&at.backlogged_ns, memory_order_acquire))

    # ---- Cells ----

    @cython.critical_section
    def cell(self, key, buffer, offset: int = 0, nbytes: int | None = None,
             filled: bool | int = False) -> int:
        """A cell over `nbytes` of a contiguous buffer from `offset` on; returns its number.

        `key`: (operation 64 bits, epoch 32, stripe 32, part 32), under which peers may pull it, or
        None. `filled`: True if all bytes are present, or their number. Only a filled cell may be in
        read-only memory. The buffer is held until CLOSED is taken from events().
        """
        self.check()
        cdef frame_key key_words
        cdef frame_key *key_pointer = NULL
        if key is not None:
            key = tuple(key)
            read_key(key, &key_words)
            key_pointer = &key_words
            if key in self.keys:
                raise ValueError(f"an open cell already has the key {key!r}")
        cdef _Held held = _Held()
        held.hold(buffer, offset, filled is True)
        whole = held.buffer.len
        size = whole - offset if nbytes is None else nbytes
        if not 0 <= size <= whole - offset:
            raise ValueError(f"{size} bytes at offset {offset} exceed a buffer of {whole} bytes")
        cdef char *data = <char *> held.buffer.buf + <Py_ssize_t> offset
        cdef uint64_t number = self.next_number()
        held.cell = cell_new(self.engine, number, data, size, bytes_there(filled, size), key_pointer)
        held.key = key
        held.open = True
        self.held[number] = held
        if key is not None:
            self.keys[key] = number
        self.post(COMMAND_CELL, held.cell, NULL)
        return number

    @cython.critical_section
    def watermark(self, cell: int) -> int:
        """The number of valid, final bytes of the cell."""
        self.check()
        return watermark_of(self.open_cell(cell))

    @cython.critical_section
    def advance(self, cell: int, watermark: int) -> None:
        """Reports that the caller has written the cell up to `watermark`; a lower value is ignored.
        Only for cells that no pull or fold fills. FILLED follows when the cell is full.
        """
        self.check()
        cdef _Held held = self.open_cell(cell)
        if not 0 <= watermark <= held.cell.nbytes:
            raise ValueError(f"watermark must be from 0 to {held.cell.nbytes}, not {watermark}")
        held.check_writable()
        engine_post(self.engine, COMMAND_ADVANCE, held.cell, NULL, NULL, NULL, watermark)

    @cython.critical_section
    def pull(self, cell: int, link: int, key=None) -> None:
        """Fills the cell over the link, from its watermark to its end.

        `key`: of the peer's cell; None: the cell's own. Replaces a running pull of this cell, and
        continues at the watermark. Ends with FILLED or PULL_FAILED.
        """
        self.check()
        cdef _Held held = self.open_cell(cell)
        cdef _Joined joined = self.open_link(link)
        cdef frame_key key_words
        held.check_writable()
        key = held.key if key is None else key
        if key is None:
            raise ValueError(f"cell {cell} has no key: give the key to pull")
        read_key(key, &key_words)
        engine_post(self.engine, COMMAND_PULL, held.cell, joined.link, NULL, &key_words, 0)

    @cython.critical_section
    def fold(self, cell: int, sources, op: str, dtype: str, divisor: int = 0,
             accumulated=(), final: bool = True) -> None:
        """Fills the cell with the left fold of `sources` in this order, as their bytes arrive.

        `accumulated`: the sources that are partial results, in accumulator_dtype(op, dtype); the
        others have elements of `dtype`. `final` False: the cell becomes a partial result. "mean" is
        a sum, which the final fold divides by `divisor` (0 or 1: no division). A source that is
        closed before the cell is FILLED causes FOLD_FAILED.
        """
        self.check()
        cdef _Held held = self.open_cell(cell)
        cdef _Held source
        cdef list numbers = list(sources)
        cdef set partial = set(accumulated)
        cdef size_t count = len(numbers)
        cdef size_t i
        cdef size_t parts = divisor if final else 0
        cdef fold_t *fold
        cdef size_t item_bytes = item_bytes_of(op, dtype, not final, True)
        held.check_writable()
        if not numbers:
            raise ValueError("a fold needs at least one source")
        if not partial <= set(numbers):
            raise ValueError("accumulated has a cell that is not a source")
        if held.cell.nbytes % item_bytes or watermark_of(held) % item_bytes:
            raise ValueError(f"cell {cell} is not a whole number of {item_bytes}-byte elements")
        items = held.cell.nbytes // item_bytes
        cdef cell_t **cells = <cell_t **> PyMem_Calloc(count, sizeof(cell_t *))
        cdef flag *flags = <flag *> PyMem_Calloc(count, 1)
        try:
            if cells == NULL or flags == NULL:
                raise MemoryError
            for i in range(count):
                source = self.open_cell(numbers[i])
                if source is held:
                    raise ValueError("a cell cannot be folded into itself")
                flags[i] = numbers[i] in partial
                if source.cell.nbytes != items * item_bytes_of(op, dtype, flags[i], False):
                    raise ValueError(f"source {numbers[i]} has {source.cell.nbytes} bytes, "
                                     f"not {items} elements")
                cells[i] = source.cell
            fold = fold_new(held.cell, number_in(OPS, op, "op"), number_in(DTYPES, dtype, "dtype"),
                            parts, final, cells, flags, count)
            engine_post(self.engine, COMMAND_FOLD, NULL, NULL, fold, NULL, 0)
        finally:
            PyMem_Free(cells)
            PyMem_Free(flags)

    @cython.critical_section
    def close(self, cell: int) -> None:
        """Closes a cell. Its key is free at once, its memory once CLOSED is taken.

        A pull or fold that fills it ends silently. Folds from it fail, and so do peers' pulls of
        it.
        """
        self.check()
        cdef _Held held = self.open_cell(cell)
        held.open = False
        if held.key is not None:
            del self.keys[held.key]
        self.post(COMMAND_CLOSE, held.cell, NULL)

    # ---- Many at once ----

    @cython.critical_section
    def hold(self) -> None:
        """Delays commands about cells until release(), so that the thread is woken once for all of
        them. Calls may be nested; each needs its release()."""
        self.check()
        engine_hold(self.engine, True)

    @cython.critical_section
    def release(self) -> None:
        """See hold()."""
        self.check()
        engine_hold(self.engine, False)

    @cython.critical_section
    def together(self, cells, vote=None) -> None:
        """FILLED of these cells comes when all of them are full; or at once for the full ones when
        one of them is closed or put into another batch. A single cell is reported alone.

        vote: (generation, call, plan) of coll_vote(), which is executed when all are full. If it
        has an effect, FILLED comes some milliseconds later, because no process waits for it.
        """
        self.check()
        cdef uint64_t generation = 0
        cdef uint64_t call = 0
        cdef uint32_t plan = 0
        if vote is not None:
            generation, call, plan = vote
        cdef list held = [self.open_cell(number) for number in set(cells)]
        cdef size_t count = len(held)
        cdef batch_t *batch = <batch_t *> engine_memory(sizeof(batch_t) + count * sizeof(cell_t *))
        batch.count = count
        batch.generation, batch.call, batch.plan = generation, call, plan
        for i in range(count):
            batch.cells[i] = (<_Held> held[i]).cell
        engine_post_batch(self.engine, batch)

    # ---- Events ----

    @cython.critical_section
    def events(self) -> list[tuple]:
        """The events since the last call, in order.

        (FILLED, cell), (PULL_FAILED, cell, reason), (FOLD_FAILED, cell, reason), (CLOSED, cell),
        (LINK_LOST, link, peer, reason).
        """
        self.check()
        cdef list found = []
        cdef event_t *event = engine_take(self.engine)
        cdef event_t *following
        while event != NULL:
            if event.kind == EVENT_LINK_LOST:
                found.append((event.kind, event.number, event.peer, event.reason.decode()))
                self.forget_link(event.number)
            elif event.kind == EVENT_FILLED:
                found.append((event.kind, event.number))
            elif event.kind >= EVENT_COLL_TAKEN:
                found.append(self.coll_event(event))
            elif event.kind == EVENT_CLOSED:
                found.append((event.kind, event.number))
                del self.held[event.number]
            else:
                found.append((event.kind, event.number, event.reason.decode()))
            following = event.next
            event_free(event)
            event = following
        return found

    cdef int forget_link(self, object number) except -1:
        cdef _Joined joined = self.joined.pop(number)
        joined.lost = True
        if not joined.driven:  # otherwise the Driver does it, after its last call
            self.post(COMMAND_FREE, NULL, joined.link)
        return 0

    @cython.critical_section
    def stop(self) -> None:
        """Ends the thread and all links, and closes all cells. All later calls fail."""
        if self.engine == NULL:
            return
        self.check()
        self.end()


include "engine_driver.pxi"


def play_coll(sleep, wake) -> None:
    """For a simulation: as play(), for the members that small calls wake."""
    play(sleep, wake)
    coll_play_c(<void *> played)
