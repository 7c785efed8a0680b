"""The shared memory of one host, for clients: headers, holders, blocks, views.

Put and get on one host are writes and lookups. Dropping a reference takes a few atomic
instructions, so it may run in any finaliser. The steps are in shm_object.h. This file keeps a
process's private state (how often it holds an object, which blocks of its spans are free), and
gives memory to Python as buffers.
"""
from cpython.buffer cimport (PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release,
                             PyObject_GetBuffer)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport errno
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

include "shm_layout.pxi"

cimport cython

cdef extern from "sys/mman.h" nogil:
    void *mmap(void *, size_t, int, int, int, long)
    int munmap(void *, size_t)
    int madvise(void *, size_t, int)
    int PROT_READ, PROT_WRITE, PROT_NONE, MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED
    int MAP_NORESERVE, MADV_DONTDUMP, MADV_REMOVE
    void *MAP_FAILED
cdef extern from "shm_file.h" nogil:
    int file_open(int, shm_file *)
    void file_close(shm_file *)
    void file_retire(shm_file *)
    int file_write(shm_file *, char *, unsigned, const char *, uint64_t, uint64_t)
    ctypedef struct shm_file:
        int fd
cdef extern from "sys/stat.h" nogil:
    ctypedef struct struct_stat "struct stat":
        uint64_t st_dev, st_ino
    int fstat(int, struct_stat *)
cdef extern from "shm_pages.h" nogil:
    void pages_populate(char *, uint64_t, unsigned)
    void pages_copy(char *, const char *, uint64_t)
cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil,
                       void (*)() noexcept nogil)

cdef int fork_count = 0  # a forked child must not touch the parent's state

cdef void _after_fork_in_child() noexcept nogil:
    global fork_count
    fork_count += 1

pthread_atfork(NULL, NULL, _after_fork_in_child)

STATES = ("FREE", "WAITING", "QUEUED", "CLAIMED", "ABORTED", "SEALED", "FAILED", "CANCELLED",
          "DELETED", "SPILLING", "SPILLED", "FREED")
INLINE_BYTES_MAX = RESULT_INLINE
closed_error = RuntimeError  # raised by calls after the cluster was closed; clients set their own
BLOCK_HEAD_BYTES = BLOCK_ALIGN
CONTROL_MEMORY_BYTES = CONTROL_BYTES


def same_file(int fd, uint64_t device, uint64_t number) -> bool:
    """Whether the descriptor is open, and still the file with these st_dev and st_ino."""
    cdef struct_stat found
    return fstat(fd, &found) == 0 and found.st_ino == number and found.st_dev == device


def create(int control_fd, int store_fd, uint64_t host_id, uint64_t store_bytes, int cores,
           int spin_us_max, uint64_t small_object_bytes_max, uint64_t span_bytes) -> None:
    """Lays out a new control memory, and sets the store's (sparse) length."""
    if span_bytes & (span_bytes - 1) or small_object_bytes_max + BLOCK_ALIGN > span_bytes:
        raise ValueError(f"objects of {small_object_bytes_max} bytes in spans of {span_bytes}")
    if ftruncate(control_fd, CONTROL_BYTES) or ftruncate(store_fd, store_bytes):
        raise OSError(errno, "the control memory or the store cannot be created")
    cdef void *p = mmap(NULL, ROOT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0)
    if p == MAP_FAILED:
        raise OSError(errno, "the control memory cannot be mapped")
    cdef shm_root *r = <shm_root *>p
    r.version = SHM_VERSION
    r.host_id = host_id
    r.store_bytes = store_bytes
    r.cores = cores
    r.spin_us_max = spin_us_max
    r.small_object_bytes_max = small_object_bytes_max
    r.span_bytes = span_bytes
    pool_of(<char *>p, 0).state = 1  # workers may start before the node does
    STORE64(&r.magic, SHM_MAGIC)
    munmap(p, ROOT_BYTES)


@cython.final
cdef class Mapping:
    """Keeps both memories mapped while anything in this process needs them."""
    cdef char *control
    cdef char *store
    cdef char *area
    cdef uint64_t store_bytes
    cdef shm_file file
    cdef int fork_mark
    cdef bint closed

    def __cinit__(self, int control_fd, int store_fd, int node_event_fd):
        self.fork_mark = fork_count
        self.file.fd = -1
        area = mmap(NULL, CONTROL_BYTES + PRIVATE_BYTES, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if area == MAP_FAILED:
            raise OSError(errno, "no address space for the control memory")
        self.area = <char *>area
        if (mmap(area, PRIVATE_BYTES, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED
                or mmap(self.area + PRIVATE_BYTES, CONTROL_BYTES, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED | MAP_NORESERVE, control_fd, 0) == MAP_FAILED):
            raise OSError(errno, "the control memory cannot be mapped")
        self.control = self.area + PRIVATE_BYTES
        set_node_event(self.control, node_event_fd)
        if root_of(self.control).magic != SHM_MAGIC:
            raise ValueError("not a control memory of this version")
        self.store_bytes = root_of(self.control).store_bytes
        store = mmap(NULL, self.store_bytes, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_NORESERVE, store_fd, 0)
        if store == MAP_FAILED:
            raise OSError(errno, "the store cannot be mapped")
        self.store = <char *>store
        file_open(store_fd, &self.file)  # without it, large values go through the mapping
        madvise(self.area, CONTROL_BYTES + PRIVATE_BYTES, MADV_DONTDUMP)
        madvise(self.store, self.store_bytes, MADV_DONTDUMP)

    def __dealloc__(self):
        file_close(&self.file)
        if self.store != NULL:
            munmap(self.store, self.store_bytes)
        if self.area != NULL:
            munmap(self.area, CONTROL_BYTES + PRIVATE_BYTES)

    cdef inline bint usable(self) noexcept:
        return not self.closed and self.fork_mark == fork_count


cdef class Client
cdef class Hold
cdef class View
cdef class Lease
cdef class Block

include "shm_holders.pxi"


cdef class Client(_Holders):
    """One client slot of a host: makes, holds, reads and drops objects.

    One method at a time changes a client's private state: such methods, and the cdef methods below
    them, run in the client's critical section (with a GIL the section compiles to nothing). Bulk
    copies run outside.
    """

    # -- bytes ---------------------------------------------------------------------------------

    @cython.critical_section
    def allocate(self, uint64_t nbytes) -> int:
        """Payload offset of a small LEASED block in a span of this client; 0: a span is needed."""
        return heap_allocate(&self.heap, self.c, self.map.store, self.slot, nbytes)

    @cython.critical_section
    def lease_small(self, uint64_t nbytes):
        """As allocate(), held by an object that returns the block if its user is interrupted. None:
        a span is needed."""
        cdef Lease lease = Lease.__new__(Lease)
        lease.payload = heap_allocate(&self.heap, self.c, self.map.store, self.slot, nbytes)
        if not lease.payload:
            return None
        lease.client = self
        return lease

    def take_lease(self, uint64_t payload, number, list seen) -> Lease:
        """Takes over a block that the node leased to this client in a reply. Records the reply in
        `seen` in the same step, because the node reclaims the blocks of unseen replies."""
        self.check_range(payload, 0)
        cdef Lease lease = Lease.__new__(Lease)
        lease.payload = payload
        lease.client = self
        seen[0] = number
        return lease

    def take_span(self, uint64_t offset, number, list seen) -> None:
        """As take_lease(), for a span."""
        self.add_span(offset)
        seen[0] = number

    @cython.critical_section
    def add_span(self, uint64_t offset) -> None:
        if heap_add(&self.heap, offset) < 0:
            raise MemoryError()

    @cython.critical_section
    def take_empty_spans(self) -> list[int]:
        """Removes and returns the spans without any block, to be given back to the node."""
        cdef uint64_t bases[64]
        cdef int n
        if SWAP32(&client_of(self.c, self.slot).returned, 0):
            heap_reclaim(&self.heap, self.map.store)
        n = heap_remove_empty(&self.heap, bases, 64)
        return [bases[i] for i in range(n)]

    cdef int check_range(self, uint64_t payload, uint64_t nbytes) except -1:
        if payload < 2 * BLOCK_ALIGN or payload > self.map.store_bytes - nbytes:
            raise ValueError(f"{nbytes} bytes at {payload} are not a block of the store")
        return 0

    cdef void give_block(self, uint64_t payload, uint64_t owner) noexcept:
        cdef shm_block *b = block_of(self.map.store, payload)
        if not b.big and b.lessee == self.slot and heap_find(&self.heap, payload) >= 0:
            if CAS64(&b.owner, owner, 0):
                heap_free(&self.heap, payload)
        else:
            return_block(self.c, self.map.store, payload, owner)

    @cython.critical_section
    def give_back(self, uint64_t payload, uint64_t owner=BLOCK_LEASED) -> None:
        """Returns a block that never became an object's, or whose result did not count."""
        self.check_range(payload, 0)
        self.give_block(payload, owner)

    def populate(self, uint64_t offset, uint64_t nbytes) -> None:
        """Maps and allocates the pages of a range in one call, without the GIL."""
        cdef uint64_t page = <uint64_t>sysconf(_SC_PAGESIZE), begin = offset & ~(page - 1)
        cdef uint64_t end = (offset + nbytes + page - 1) & ~(page - 1)
        cdef unsigned cores = root_of(self.c).cores
        with nogil:
            pages_populate(self.map.store + begin, end - begin, cores)

    def write(self, uint64_t payload, bytes head, list buffers, list offsets) -> None:
        """Copies head and buffers, with zeros in the gaps (without a head: after the first
        buffer)."""
        self.check_range(payload, PyBytes_GET_SIZE(head))
        self.copy_in(self.map.store + payload, head, buffers, offsets, 0)

    def write_cold(self, uint64_t payload, bytes head, list buffers, list offsets) -> None:
        """As write(), for a large block whose pages this process has not mapped. If possible, the
        kernel copies into fresh pages, which need not be cleared and mapped first."""
        self.check_range(payload, PyBytes_GET_SIZE(head))
        self.copy_in(self.map.store + payload, head, buffers, offsets, payload)

    cdef int copy_in(self, char *to, bytes head, list buffers, list offsets,
                     uint64_t cold) except -1:
        cdef Py_buffer view
        cdef uint64_t i, at, end = PyBytes_GET_SIZE(head)
        memcpy(to, PyBytes_AS_STRING(head), end)
        for i in range(len(buffers)):
            at = offsets[i]
            PyObject_GetBuffer(buffers[i], &view, PyBUF_SIMPLE)
            # otherwise others could read the old bytes
            if at > end > 0: memset(to + end, 0, at - end)
            end = at + view.len
            if view.len > 16384 and cold:
                with nogil:
                    if not file_write(&self.map.file, self.c, self.slot, <char *>view.buf,
                                      view.len, cold + at):
                        pages_copy(to + at, <char *>view.buf, view.len)
            elif view.len > 16384:
                with nogil:
                    memcpy(to + at, view.buf, view.len)
            elif view.len:
                memcpy(to + at, view.buf, view.len)
            PyBuffer_Release(&view)
        return 0

    def put(self, Lease lease not None, uint64_t nbytes, bint refs) -> Hold:
        """Makes a sealed object of a written LEASED block. Returns the held ref."""
        cdef Hold hold
        with cython.critical_section(self, lease):
            lease.check()
            hold = self.put_at(KIND_PUT, lease.payload, nbytes, refs)
            lease.gone = True
        return hold

    cdef Hold put_at(self, unsigned kind, uint64_t payload, uint64_t nbytes, bint refs, bint pin=0):
        self.check_range(payload, nbytes)
        cdef Hold hold = Hold.__new__(Hold)
        cdef uint64_t oid = self.new_header(kind, ST_CLAIMED, self.slot, 0, payload, nbytes,
                                            FLAG_REFS if refs else 0)
        STORE64(&block_of(self.map.store, payload).owner, oid)
        if pin: self.pin_own(oid)
        change_state(self.c, oid, ST_CLAIMED, ST_SEALED, self.slot, -1)
        self.counted(nbytes)
        hold.oid = oid
        hold.client = self
        return hold

    @cython.critical_section
    def publish(self, uint64_t payload, uint64_t nbytes, bint refs) -> int:
        """As put(), with a count that the caller must release()."""
        return self.disown(self.put_at(KIND_PUT, payload, nbytes, refs))

    def publish_inline(self, bytes head, list buffers, list offsets, uint64_t nbytes,
                       bint refs) -> int:
        """As put_inline(), with a count that the caller must release()."""
        return self.disown(self.put_inline(head, buffers, offsets, nbytes, refs))

    cdef uint64_t disown(self, Hold hold) except 0:
        hold.client = None
        return hold.oid

    def put_inline(self, bytes head, list buffers, list offsets, uint64_t nbytes,
                   bint refs) -> Hold:
        """A sealed object of at most INLINE_BYTES_MAX, in the header's own record."""
        cdef char data[RESULT_INLINE]
        if nbytes > RESULT_INLINE:
            raise ValueError(f"{nbytes} bytes do not fit into {RESULT_INLINE}")
        self.copy_in(data, head, buffers, offsets, 0)  # first the step that can fail
        return self.put_data(data, nbytes, refs)

    @cython.critical_section
    cdef Hold put_data(self, const char *data, uint64_t nbytes, bint refs):
        cdef Hold hold = Hold.__new__(Hold)
        cdef uint64_t oid = self.new_header(KIND_PUT, ST_CLAIMED, self.slot, 0, 0, nbytes,
                                            FLAG_INLINE | (FLAG_REFS if refs else 0))
        memcpy(record_of(self.c, oid).result_inline, data, nbytes)
        change_state(self.c, oid, ST_CLAIMED, ST_SEALED, self.slot, -1)
        self.counted(nbytes)
        hold.oid = oid
        hold.client = self
        return hold

    cdef inline void counted(self, uint64_t nbytes) noexcept:
        cdef shm_client *me = client_of(self.c, self.slot)
        me.puts += 1
        me.put_bytes += nbytes

    def bind(self, uint64_t oid, uint64_t payload, uint64_t nbytes, bint refs) -> None:
        """A claimant's result: the LEASED block becomes the object's, before the object is
        finished."""
        self.bind_at(oid, payload, nbytes, refs)

    cdef int bind_at(self, uint64_t oid, uint64_t payload, uint64_t nbytes, bint refs) except -1:
        self.check_range(payload, nbytes)
        self.check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        h.size = nbytes
        h.block = payload
        OR8(&h.flags, FLAG_REFS if refs else 0)
        STORE64(&block_of(self.map.store, payload).owner, oid)
        return 0

    def bind_inline(self, uint64_t oid, bytes head, list buffers, list offsets, uint64_t nbytes,
                    bint refs) -> None:
        self.check(oid)
        if nbytes > RESULT_INLINE:
            raise ValueError(f"{nbytes} bytes do not fit into {RESULT_INLINE}")
        cdef shm_header *h = header_of(self.c, oid)
        self.copy_in(<char *>record_of(self.c, oid).result_inline, head, buffers, offsets, 0)
        h.size = nbytes
        OR8(&h.flags, FLAG_INLINE | (FLAG_REFS if refs else 0))

    @cython.critical_section
    def pin_claimed(self, uint64_t oid) -> None:
        """Pins a result that this client is still writing: its array stays mapped and complete."""
        self.check(oid)
        self.pin_own(oid)

    cdef int pin_own(self, uint64_t oid) except -1:
        cdef uint64_t w
        acquire_bit(self.c, oid, self.slot, 1, &w)
        self.count(self.pins, ID_TABLE(oid))[ID_INDEX(oid)] += 1

    @cython.critical_section
    def drop_pin(self, uint64_t oid) -> None:
        self.check(oid)
        if not self.pins[ID_TABLE(oid)] or not self.pins[ID_TABLE(oid)][ID_INDEX(oid)]:
            raise ValueError(f"{oid:#x} is not pinned here")
        self.unpin(oid)

    def bind_lease(self, uint64_t oid, Lease lease not None, uint64_t nbytes, bint refs) -> None:
        """As bind(). The block now belongs to the object."""
        with cython.critical_section(lease):
            lease.check()
            self.bind_at(oid, lease.payload, nbytes, refs)
            lease.gone = True

    def block_of(self, Lease lease not None, uint64_t nbytes) -> Block:
        """As block(), from a lease."""
        cdef Block b
        with cython.critical_section(lease):
            lease.check()
            b = self.block_at(lease.payload, nbytes)
            lease.gone = True
        return b

    def block(self, uint64_t payload, uint64_t nbytes):
        """A writable buffer over a LEASED block, which is freed with the last array over it."""
        return self.block_at(payload, nbytes)

    cdef Block block_at(self, uint64_t payload, uint64_t nbytes):
        self.check_range(payload, nbytes)
        cdef Block b = Block.__new__(Block)
        b.client = self
        b.payload = payload
        b.size = nbytes
        self.live_leases[<uint64_t><void *>b] = (payload, nbytes)
        return b

    @cython.critical_section
    def give_back_all(self) -> None:
        """For the last process of a closed cluster: frees memory that no own view pins. No effect
        if another driver was attached, which may still read its pins."""
        cdef list kept = [(0, 0)]
        cdef unsigned t, i
        cdef shm_header *h
        cdef uint64_t at = 0, begin, end
        for t in range(1, CLIENTS):
            if (t != self.slot and LOAD32(&client_of(self.c, t).state)
                    and client_of(self.c, t).kind == CLIENT_DRIVER):
                return
        for t in range(TABLES):
            if self.pins[t] == NULL:
                continue
            for i in range(TABLE_HEADERS):
                h = header_at(self.c, t, i)
                if self.pins[t][i] and h.block:
                    kept.append((h.block & ~4095ULL, (h.block + h.size + 4095) & ~4095ULL))
        kept += [(b & ~4095, (b + n + 4095) & ~4095) for b, n in self.live_leases.values()]
        kept.append((self.map.store_bytes, self.map.store_bytes))
        kept.sort()
        for begin, end in kept:
            if begin > at:
                madvise(self.map.store + at, begin - at, MADV_REMOVE)
            at = max(at, end)

    # -- collecting ----------------------------------------------------------------------------

    cdef void forget(self, uint64_t oid) noexcept:
        cdef shm_header *h = header_of(self.c, oid)
        if h.block and not h.flags & (FLAG_INLINE | FLAG_RETURNED):
            self.give_block(h.block, oid)

    def news(self) -> bool:
        """Whether there is anything to collect in the own tables, which may belong to others after
        close()."""
        cdef int t
        for t in self.own_tables:
            if LOAD64(&table_of(self.c, t).freed_summary) and not self.map.closed:
                return True
        return False

    @cython.critical_section
    def collect(self) -> list[int]:
        """Collects unheld objects. Returns the ids that list refs, which the caller must drop now.
        The node gets all ids, because they may concern other hosts."""
        cdef list inner = []
        cdef int t
        cdef uint64_t summary, bits, w, oid
        cdef unsigned word, bit
        cdef shm_header *h
        cdef shm_table *table
        if not self.map.usable():
            return inner
        for t in self.own_tables:
            table = table_of(self.c, t)
            if not LOAD64(&table.freed_summary):
                continue
            summary = SWAP64(&table.freed_summary, 0)
            while summary:
                word = ctz(summary)
                summary &= summary - 1
                bits = SWAP64(&table.freed[word], 0)
                while bits:
                    bit = ctz(bits)
                    bits &= bits - 1
                    h = header_at(self.c, t, word * 64 + bit)
                    w = LOAD64(&h.word)
                    oid = ID_MAKE(t, word * 64 + bit, WORD_GENERATION(w))
                    if WORD_STATE(w) == ST_FREED:
                        self.forget(oid)
                        if h.flags & FLAG_REFS or self.slot == NODE_SLOT:
                            inner.append(oid)
                        self.free_header(t, word * 64 + bit)
                    elif WORD_STATE(w) == ST_DELETED and mask_empty(h.pins):
                        self.forget(oid)
                        OR8(&h.flags, FLAG_RETURNED)
                        if h.flags & FLAG_REFS or self.slot == NODE_SLOT:
                            inner.append(oid)
                        try_free(self.c, oid)
        return inner

    cdef void free_header(self, unsigned t, unsigned index) noexcept:
        cdef shm_header *h = header_at(self.c, t, index)
        cdef uint64_t w
        while True:
            w = LOAD64(&h.word)
            if CAS64(&h.word, w, (w & WORD_ACQUIRES_MASK)
                     | WORD_MAKE((WORD_GENERATION(w) + 1) & GENERATION_MASK, 0, 0, ST_FREE)):
                break
        table_of(self.c, t).used[index // 64] &= ~(1ULL << (index % 64))
        self.free_index[t][self.free_count[t]] = <uint16_t>index
        self.free_count[t] += 1

    # -- looking (tests, statistics) -----------------------------------------------------------

    def inspect(self, uint64_t oid) -> dict:
        """Every field of a header, for tests and `stats`."""
        self.check(oid)
        return describe(self.c, ID_TABLE(oid), ID_INDEX(oid))

    def scan(self, bint free_too=False) -> list[dict]:
        """All headers in use, in all tables."""
        found = []
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            for i in range(LOAD32(&table_of(self.c, t).high)):
                if free_too or WORD_STATE(LOAD64(&header_at(self.c, t, i).word)) != ST_FREE:
                    found.append(describe(self.c, t, i))
        return found

    @cython.critical_section
    def private_counts(self, uint64_t oid) -> tuple[int, int]:
        """How often this process holds and pins the object."""
        self.check(oid)
        cdef uint32_t *r = self.refs[ID_TABLE(oid)]
        cdef uint32_t *p = self.pins[ID_TABLE(oid)]
        return (0 if r == NULL else r[ID_INDEX(oid)], 0 if p == NULL else p[ID_INDEX(oid)])


include "shm_views.pxi"
include "shm_counts.pxi"
include "shm_node.pxi"
