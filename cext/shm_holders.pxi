# The lower half of Client: headers, holds, payloads.

cdef class _Holders:
    """The lower half of Client: headers, refs and pins of one client slot."""
    cdef Mapping map
    cdef char *c
    cdef readonly unsigned slot
    cdef readonly uint64_t host_id
    cdef uint32_t *refs[TABLES]
    cdef uint32_t *pins[TABLES]
    cdef span_heap heap
    cdef list own_tables      # table numbers
    cdef dict live_leases     # id of a Block -> (payload, bytes): arrays of empty() in use
    cdef uint16_t *free_index[TABLES]
    cdef uint32_t free_count[TABLES]
    cdef int making           # the table of the latest new header; -1: none
    cdef object __weakref__

    def __cinit__(self, int control_fd, int store_fd, unsigned slot, int node_event_fd):
        self.map = Mapping(control_fd, store_fd, node_event_fd)
        self.c = self.map.control
        self.slot = slot
        self.host_id = root_of(self.c).host_id
        self.own_tables = []
        self.making = -1
        self.live_leases = {}
        heap_init(&self.heap, root_of(self.c).span_bytes, root_of(self.c).small_object_bytes_max,
                  spans_of(self.c))

    def __dealloc__(self):
        cdef int t
        for t in range(TABLES):
            free(self.refs[t])
            free(self.pins[t])
            free(self.free_index[t])
        heap_clear(&self.heap)

    @property
    def usable(self) -> bool:
        """False after close(), and in a forked child."""
        return self.map.usable()

    @property
    def forked(self) -> bool:
        """True in a process that was forked from the process that opened the memory."""
        return self.map.fork_mark != fork_count

    @property
    def removed(self) -> bool:
        """Whether `remove_node` has made this host's node leave its cluster."""
        return LOAD32(&root_of(self.c).removed) != 0

    def set_removed(self) -> None:
        STORE32(&root_of(self.c).removed, 1)

    @property
    def printed(self) -> int:
        """Incremented whenever something was printed for a driver of this host."""
        return LOAD32(&root_of(self.c).printed)

    def note_printed(self) -> None:
        ADD32(&root_of(self.c).printed, 1)

    @property
    def control_address(self) -> int:
        return <uint64_t>self.c

    @property
    def store_address(self) -> int:
        return <uint64_t>self.map.store

    @property
    def closing(self) -> bool:
        return LOAD32(&root_of(self.c).closing) != 0

    def set_closing(self) -> None:
        STORE32(&root_of(self.c).closing, 1)

    @cython.critical_section
    def close(self) -> None:
        """Ends all atomics of this client. Memory stays mapped while it has views."""
        self.map.closed = True
        file_retire(&self.map.file)

    # -- headers -------------------------------------------------------------------------------

    cdef int take_table(self) except -1:
        cdef shm_root *r = root_of(self.c)
        cdef uint32_t t, high, i
        for t in range(TABLES):
            if LOAD32(&table_of(self.c, t).owner):
                continue
            high = LOAD32(&r.tables_high)  # first: tables beyond it are never swept
            while high < t + 1 and not CAS32(&r.tables_high, high, t + 1):
                high = LOAD32(&r.tables_high)
            if CAS32(&table_of(self.c, t).owner, 0, self.slot + 1):
                break
        else:
            raise MemoryError(f"all {TABLES * TABLE_HEADERS} object headers of this host are taken")
        memset(table_of(self.c, t).used, 0, sizeof(table_of(self.c, t).used))
        memset(table_of(self.c, t).open, 0, sizeof(table_of(self.c, t).open))
        memset(table_of(self.c, t).pool_groups, 0, sizeof(table_of(self.c, t).pool_groups))
        STORE64(&table_of(self.c, t).pools, 0)
        if self.free_index[t] == NULL:
            self.free_index[t] = <uint16_t *>calloc(TABLE_HEADERS, 2)
            if self.free_index[t] == NULL:
                raise MemoryError()
        for i in range(TABLE_HEADERS):
            self.free_index[t][i] = <uint16_t>(TABLE_HEADERS - 1 - i)
        self.free_count[t] = TABLE_HEADERS - (t == 0)  # the id 0 means "none"
        self.own_tables.append(t)
        return t

    cdef uint64_t new_header(self, unsigned kind, unsigned state, unsigned claimant, unsigned pool,
                             uint64_t block, uint64_t size, unsigned flags) except 0:
        """A header of this client with one ref of this process."""
        cdef int t = -1
        cdef uint32_t index, gen
        cdef uint64_t w, bit
        cdef shm_header *h
        cdef shm_table *table
        if self.map.closed:  # closed by another thread: the tables may already be the node's
            raise closed_error("the cluster was closed during this call")
        t = self.making
        if t < 0 or not self.free_count[t]:
            for t in self.own_tables:
                if self.free_count[t]:
                    break
            else:
                t = self.take_table()
            self.making = t
        self.free_count[t] -= 1
        index = self.free_index[t][self.free_count[t]]
        table = table_of(self.c, t)
        if table.high <= index:
            STORE32(&table.high, index + 1)
        bit = 1ULL << (index % 64)
        if not table.used[index // 64]:
            forget_pools(table, index // 64)
        table.used[index // 64] |= bit  # only the owner writes it
        if kind == KIND_TASK:
            note_pool(table, index, pool)
        if kind != KIND_PUT and kind != KIND_LENT:
            OR64(&table.open[index // 64], bit)
        elif LOAD64(&table.open[index // 64]) & bit:  # set by a dead process, earlier
            AND64(&table.open[index // 64], ~bit)
        h = header_at(self.c, t, index)
        OR64(&h.refs[self.slot // 64], 1ULL << (self.slot % 64))
        h.block = block
        h.size = size
        h.stamp = now_stamp()
        h.kind = kind
        h.flags = flags
        h.pool = pool
        h.taken = 0
        h.spill = 0
        while True:
            w = LOAD64(&h.word)
            gen = WORD_GENERATION(w)
            if CAS64(&h.word, w, (w & WORD_ACQUIRES_MASK)
                     | WORD_MAKE(gen, 0, claimant, state)):
                break
        self.count(self.refs, t)[index] += 1
        return ID_MAKE(t, index, gen)

    cdef inline uint32_t *count(self, uint32_t **counts, unsigned table) except NULL:
        if counts[table] == NULL:
            counts[table] = <uint32_t *>calloc(TABLE_HEADERS, 4)
            if counts[table] == NULL:
                raise MemoryError()
        return counts[table]

    @cython.critical_section
    def new(self, unsigned kind, unsigned state, unsigned claimant=0, unsigned pool=0) -> int:
        """A header without bytes (a task's or an operation's result), with one ref."""
        return self.new_header(kind, state, claimant, pool, 0, 0, 0)

    @cython.critical_section
    def draft(self, unsigned kind, unsigned pool=0) -> Hold:
        """A WAITING header without bytes, with a hold. It is cancelled with its hold unless keep()
        was called, so an interrupted maker leaves nothing behind."""
        cdef Hold h = Hold.__new__(Hold)
        h.oid = self.new_header(kind, ST_WAITING, 0, pool, 0, 0, 0)
        h.client = <Client>self
        h.draft = True
        return h

    cdef int check(self, uint64_t oid) except -1:
        if not id_valid(oid):
            raise ValueError(f"{oid:#x} is not a local id")
        return 0

    # -- holders -------------------------------------------------------------------------------

    @cython.critical_section
    def acquire(self, uint64_t oid) -> bool:
        """Adds a hold on the object; False if it is gone."""
        self.check(oid)
        return self.acquire_ref(oid)

    cdef bint acquire_ref(self, uint64_t oid) except -1:
        cdef uint32_t *n = self.count(self.refs, ID_TABLE(oid)) + ID_INDEX(oid)
        cdef uint64_t w
        cdef unsigned s
        if n[0]:  # already held, so the header exists, perhaps in another generation
            if WORD_GENERATION(LOAD64(&header_of(self.c, oid).word)) != ID_GENERATION(oid):
                return False
            n[0] += 1
            return True
        s = acquire_bit(self.c, oid, self.slot, 0, &w)
        if s == ST_FREE or s == ST_FREED:
            release_bit(self.c, oid, self.slot, 0)
            return False
        n[0] = 1
        return True

    @cython.critical_section
    def release(self, uint64_t oid) -> None:
        """Drops one hold of acquire() or new()."""
        self.check(oid)
        if not self.refs[ID_TABLE(oid)] or not self.refs[ID_TABLE(oid)][ID_INDEX(oid)]:
            raise ValueError(f"{oid:#x} is not held here")
        self.release_ref(oid)

    cdef void release_ref(self, uint64_t oid) noexcept:
        if not self.map.usable():
            return
        cdef uint32_t *n = self.refs[ID_TABLE(oid)] + ID_INDEX(oid)
        n[0] -= 1
        if n[0] == 0:
            release_bit(self.c, oid, self.slot, 0)

    @cython.critical_section
    def hold(self, uint64_t oid, bint acquire=True):
        """A Hold that drops the ref when it is deallocated; None if the object is gone.

        acquire=False takes over the hold of new() or publish().
        """
        self.check(oid)
        if acquire and not self.acquire_ref(oid):
            return None
        cdef Hold h = Hold.__new__(Hold)
        h.client = <Client>self
        h.oid = oid
        return h

    cdef int pin(self, uint64_t oid) except -1:
        """Returns the state. SEALED or FAILED: a pin is now held."""
        cdef uint32_t *n = self.count(self.pins, ID_TABLE(oid)) + ID_INDEX(oid)
        cdef shm_header *h = header_of(self.c, oid)
        cdef uint64_t w
        cdef unsigned s
        if n[0]:
            w = LOAD64(&h.word)
            if WORD_GENERATION(w) != ID_GENERATION(oid):
                return ST_FREE
            s = WORD_STATE(w)
            if s == ST_SPILLING:
                s = ST_SEALED  # the pin precedes the node's check: it will return to SEALED
            if s == ST_SEALED or s == ST_FAILED:
                n[0] += 1
            return s
        s = acquire_bit(self.c, oid, self.slot, 1, &w)
        if s == ST_SEALED or s == ST_FAILED:
            n[0] += 1
            h.stamp = now_stamp()
        elif n[0] == 0:
            release_bit(self.c, oid, self.slot, 1)
        return s

    cdef void unpin(self, uint64_t oid) noexcept:
        if not self.map.usable():
            return
        cdef uint32_t *n = self.pins[ID_TABLE(oid)] + ID_INDEX(oid)
        n[0] -= 1
        if n[0] == 0:
            release_bit(self.c, oid, self.slot, 1)

    @cython.critical_section
    def view(self, uint64_t oid):
        """The payload: a View that pins it, or bytes if it is inline; otherwise the state (int)."""
        self.check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        cdef int s = self.pin(oid)
        if s != ST_SEALED and s != ST_FAILED:
            return s
        cdef View v
        if h.flags & FLAG_INLINE:
            try:
                return PyBytes_FromStringAndSize(
                    <char *>record_of(self.c, oid).result_inline, <Py_ssize_t>h.size)
            finally:
                self.unpin(oid)
        v = View.__new__(View)
        v.client = <Client>self
        v.oid = oid
        v.address = self.map.store + h.block
        v.size = h.size
        return v

    def state(self, uint64_t oid) -> int:
        """The present state; FREE if this generation is gone."""
        self.check(oid)
        w = LOAD64(&header_of(self.c, oid).word)
        return WORD_STATE(w) if WORD_GENERATION(w) == ID_GENERATION(oid) else ST_FREE

    def flags(self, uint64_t oid) -> tuple[bool, bool]:
        """(lists refs, readers see it as deleted rather than cancelled)."""
        self.check(oid)
        cdef uint8_t f = header_of(self.c, oid).flags
        return (f & FLAG_REFS) != 0, (f & FLAG_ABORT_DELETE) != 0

    def delete(self, uint64_t oid) -> int:
        """1: deleted; 0: nothing to delete; -1: it is being spilled, call again."""
        self.check(oid)
        return delete_object(self.c, oid)
