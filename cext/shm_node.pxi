# For the node only: registering and sweeping clients, leasing blocks, spilling.

cdef list slots_of(uint64_t *mask):
    cdef list found = []
    cdef uint64_t bits
    cdef int i
    for i in range(MASK_WORDS):
        bits = LOAD64(&mask[i])
        while bits:
            found.append(64 * i + ctz(bits))
            bits &= bits - 1
    return found


cdef dict describe(char *c, unsigned t, unsigned i):
    cdef shm_header *h = header_at(c, t, i)
    cdef shm_record *r = record_at(c, t, i)
    cdef uint64_t w = LOAD64(&h.word)
    return {
        "id": ID_MAKE(t, i, WORD_GENERATION(w)), "state": STATES[WORD_STATE(w)],
        "claimant": WORD_CLAIMANT(w), "attempt": WORD_ATTEMPT(w), "kind": h.kind,
        "flags": h.flags, "block": h.block, "size": h.size, "stamp": h.stamp, "pool": h.pool,
        "taken": h.taken, "spill": h.spill, "owner": <int>table_of(c, t).owner - 1,
        "refs": slots_of(h.refs), "pins": slots_of(h.pins),
        "retries_left": r.retries_left, "tries": r.tries,
    }


@cython.final
cdef class NodeClient(_Counting):
    """Client slot 0. Python keeps the store's budget; the words are changed here."""
    cdef uint64_t returns_seen
    cdef bint look_at_all  # a client died, perhaps between returning a block and reporting it

    def register(self, unsigned slot, uint32_t kind, uint32_t pool) -> int:
        """Takes a free client slot (or this one, if slot > 0). Returns it; -1 if all are taken."""
        cdef shm_client *s
        cdef unsigned i
        if slot >= CLIENTS:
            raise ValueError(f"client slot {slot}: there are {CLIENTS}")
        for i in range(1, CLIENTS) if slot == 0 else range(slot, slot + 1):
            s = client_of(self.c, i)
            if s.state == 0:
                s.pid = 0
                s.kind = kind
                s.pool = pool
                s.generation += 1
                if slot == 0:  # the client of a given slot may already be working or asleep
                    s.event = s.sleeping = s.returned = s.blocked = s.task = s.retire = s.stands_in = 0
                    s.running = s.deadline_ns = s.deadline_id = 0
                    s.waiting_id = s.waiting_last = 0
                    trace_clear(self.c, i)
                STORE32(&s.state, 1)
                return i
        return -1

    def unregister(self, unsigned slot) -> None:
        """After the sweep: frees the slot."""
        self.set_stands_in(slot, False)
        client_of(self.c, slot).tasks_done = client_of(self.c, slot).tasks_failed = 0
        STORE32(&client_of(self.c, slot).state, 0)

    def set_stands_in(self, unsigned slot, bint value) -> None:
        """Whether the worker in that slot is a stand-in for a worker that waits inside a task. A
        stand-in begins no task before release_stand_ins() of _tasks."""
        cdef shm_client *s = client_of(self.c, slot)
        cdef shm_pool *p = pool_of(self.c, s.pool)
        cdef bint before = LOAD32(&s.stands_in) != STANDS_NOT
        STORE32(&s.stands_in, STANDS_ASIDE if value else STANDS_NOT)
        if s.kind == CLIENT_WORKER and before != value:
            STORE32(&p.stand_ins, p.stand_ins + 1 if value else p.stand_ins - 1)

    def set_retire(self, unsigned slot, uint32_t value) -> None:
        STORE32(&client_of(self.c, slot).retire, value)

    def open_pool(self, unsigned pool, uint32_t state) -> None:
        """0 free, 1 open, 2 closing, 3 broken, 4 an ended actor's."""
        STORE32(&pool_of(self.c, pool).state, state)

    def client_info(self, unsigned slot) -> dict:
        cdef shm_client *s = client_of(self.c, slot)
        return {"state": s.state, "pid": s.pid, "kind": s.kind, "pool": s.pool,
                "generation": s.generation, "blocked": s.blocked, "running": s.running,
                "deadline_ns": LOAD64(&s.deadline_ns), "deadline_id": LOAD64(&s.deadline_id),
                "waiting_id": LOAD64(&s.waiting_id), "waiting_n": LOAD64(&s.waiting_n),
                "waiting_ns": LOAD64(&s.waiting_ns),
                "tasks_done": s.tasks_done,
                "tasks_failed": s.tasks_failed, "puts": s.puts, "put_bytes": s.put_bytes}

    def worker_info(self, unsigned slot) -> tuple[int, bool, int, int]:
        """The node polls this for each worker in each turn: how many of its threads wait inside a
        task, whether it has ever begun one, and the earliest deadline of its tasks in ns, or 0,
        with that task's header."""
        cdef shm_client *s = client_of(self.c, slot)
        worked = s.tasks_done != 0 or s.tasks_failed != 0 or s.running != 0
        return s.blocked, worked, LOAD64(&s.deadline_ns), LOAD64(&s.deadline_id)

    def concerned(self, unsigned slot) -> list[dict]:
        """Headers in the tables of a (dead) client, or that it has claimed, now or last."""
        cdef list found = []
        cdef unsigned t, i, high
        cdef uint64_t w
        cdef bint owned
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            owned = LOAD32(&table_of(self.c, t).owner) == slot + 1
            high = LOAD32(&table_of(self.c, t).high)
            for i in range(high):
                w = LOAD64(&header_at(self.c, t, i).word)
                if WORD_STATE(w) != ST_FREE and (owned or WORD_CLAIMANT(w) == slot):
                    found.append(describe(self.c, t, i))
        return found

    def queued_in(self, unsigned pool, bint waiting_too=False) -> list[int]:
        """Tasks that wait for a worker of that pool, in the order of submission. `waiting_too`:
        also tasks that wait for their arguments."""
        cdef list found = []
        cdef unsigned t, i, word
        cdef shm_header *h
        cdef shm_table *table
        cdef uint64_t w, used, words
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            table = table_of(self.c, t)
            words = LOAD64(&table.pool_groups[pool % 64])
            while words:
                word = ctz(words)
                words &= words - 1
                used = LOAD64(&table.used[word])
                while used:
                    i = word * 64 + ctz(used)
                    used &= used - 1
                    h = header_at(self.c, t, i)
                    w = LOAD64(&h.word)
                    if h.pool == pool and h.kind == KIND_TASK and (
                            WORD_STATE(w) == ST_QUEUED
                            or (waiting_too and WORD_STATE(w) == ST_WAITING)):
                        found.append((record_at(self.c, t, i).submitted_ns,
                                      ID_MAKE(t, i, WORD_GENERATION(w))))
        found.sort()
        return [oid for _, oid in found]

    def queued_counts(self) -> dict[int, int]:
        """Pool -> number of tasks that wait for one of its workers, or for their arguments."""
        cdef dict found = {}
        cdef unsigned t, i, state
        cdef shm_header *h
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            for i in range(LOAD32(&table_of(self.c, t).high)):
                h = header_at(self.c, t, i)
                state = WORD_STATE(LOAD64(&h.word))
                if (state == ST_QUEUED or state == ST_WAITING) and h.kind == KIND_TASK:
                    found[h.pool] = found.get(h.pool, 0) + 1
        return found

    def announce(self, uint64_t oid) -> None:
        announce_done(self.c, oid)

    def wake_waiters(self, uint64_t oid) -> None:
        """Makes the waiters of that task check it again, although it is not done."""
        wake_waiters(self.c, oid)

    def settle(self, uint64_t oid, unsigned slot) -> bool:
        """ABORTED by a dead claimant -> CANCELLED or DELETED; its unfinished result is void."""
        if WORD_CLAIMANT(LOAD64(&header_of(self.c, oid).word)) != slot:
            return False
        self.void_location(oid, ST_ABORTED)
        return settle_abort(self.c, oid, slot)

    def take_over(self, uint64_t oid, unsigned slot) -> bool:
        """WAITING, QUEUED, or CLAIMED by the dead `slot` -> CLAIMED by the node, which then
        writes."""
        # First the claim: a living worker may have just claimed it, and may be writing its result.
        if (change_state(self.c, oid, ST_WAITING, ST_CLAIMED, -1, NODE_SLOT)
                or change_state(self.c, oid, ST_QUEUED, ST_CLAIMED, -1, NODE_SLOT)
                or change_state(self.c, oid, ST_CLAIMED, ST_CLAIMED, slot, NODE_SLOT)):
            self.void_location(oid, ST_CLAIMED)
            return True
        return False

    cdef void void_location(self, uint64_t oid, unsigned state) noexcept:
        """A dead claimant's unfinished result must not be mistaken for the next claimant's."""
        cdef shm_header *h = header_of(self.c, oid)
        cdef uint64_t w = LOAD64(&h.word)
        if WORD_GENERATION(w) == ID_GENERATION(oid) and WORD_STATE(w) == state:
            h.block = 0
            h.size = 0
            AND8(&h.flags, FLAG_ABORT_DELETE)

    def requeue(self, uint64_t oid, unsigned slot) -> bool:
        """Queues a dead claimant's task again, with one retry fewer; WAITING instead if it has a
        delay between its tries."""
        cdef shm_header *h = header_of(self.c, oid)
        cdef shm_record *r = record_of(self.c, oid)
        cdef uint64_t w = LOAD64(&h.word)
        if (WORD_STATE(w) != ST_CLAIMED or WORD_CLAIMANT(w) != slot
                or WORD_GENERATION(w) != ID_GENERATION(oid)):
            return False
        self.void_location(oid, ST_CLAIMED)
        if r.retries_left:
            r.retries_left -= 1
        r.tries += 1
        return change_state(self.c, oid, ST_CLAIMED,
                            ST_WAITING if r.flags & RECORD_DELAYED else ST_QUEUED, slot, -1)

    def give_task_back(self, uint64_t oid) -> bool:
        """A task that the node had claimed for another host waits again, with no trace of the
        claim."""
        cdef uint64_t w = LOAD64(&header_of(self.c, oid).word)
        if WORD_GENERATION(w) != ID_GENERATION(oid) or WORD_STATE(w) != ST_CLAIMED:
            return False
        self.void_location(oid, ST_CLAIMED)
        return change_state(self.c, oid, ST_CLAIMED, ST_QUEUED, NODE_SLOT, -1)

    def add_try(self, uint64_t oid) -> int:
        record_of(self.c, oid).tries += 1
        return record_of(self.c, oid).tries

    def task_name(self, uint64_t oid) -> str:
        return (<bytes>record_of(self.c, oid).name[:NAME_BYTES]).split(b"\0")[0].decode(
            errors="replace")

    @cython.critical_section
    def sweep(self, unsigned slot, bint pins=True) -> None:
        """Clears a dead client's bits, frees its queues, adopts its tables. pins=False: not its
        pins, because its process lives and still reads what it had pinned."""
        cdef unsigned t, i
        cdef list adopted = []
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            if LOAD32(&table_of(self.c, t).owner) == slot + 1:
                adopted.append(t)
        self.look_at_all = True
        with nogil:
            sweep_ownership(self.c, slot)
            sweep_bits(self.c, slot, pins)
        for t in adopted:
            if self.free_index[t] == NULL:
                self.free_index[t] = <uint16_t *>calloc(TABLE_HEADERS, 2)
                if self.free_index[t] == NULL:
                    raise MemoryError()
            self.free_count[t] = 0  # the node makes no headers here; see release_tables()
            self.own_tables.append(t)
            # objects freed before the adoption are checked again
            for i in range(table_of(self.c, t).high):
                if WORD_STATE(LOAD64(&header_at(self.c, t, i).word)) == ST_FREE:
                    table_of(self.c, t).used[i // 64] &= ~(1ULL << (i % 64))
                else:
                    table_of(self.c, t).used[i // 64] |= 1ULL << (i % 64)
                if WORD_STATE(LOAD64(&header_at(self.c, t, i).word)) in (ST_FREED, ST_DELETED):
                    OR64(&table_of(self.c, t).freed[i // 64], 1ULL << (i % 64))
                    OR64(&table_of(self.c, t).freed_summary, 1ULL << (i // 64))

    @cython.critical_section
    def release_tables(self, keep) -> list[int]:
        """Frees adopted tables (those not in `keep`) without any header in use. Returns them."""
        cdef list left = []
        cdef list given = []
        cdef unsigned t, i
        for t in self.own_tables:
            if t not in keep:
                for i in range(TABLE_WORDS):
                    if table_of(self.c, t).used[i]:
                        break
                else:
                    given.append(t)
                    if self.making == <int>t:
                        self.making = -1
                    continue
            left.append(t)
        self.own_tables = left
        for t in given:
            STORE32(&table_of(self.c, t).owner, 0)
        return given

    @property
    def tables(self) -> list[int]:
        return list(self.own_tables)

    def live_blocks(self) -> dict[int, int]:
        """Payload offset -> local id, for every header with bytes."""
        cdef dict found = {}
        cdef unsigned t, i
        cdef uint64_t at, oid
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            for i in range(LOAD32(&table_of(self.c, t).high)):
                at = live_block(self.c, self.map.store, t, i, &oid)
                if at:
                    found[at] = oid
        return found

    # -- big blocks ----------------------------------------------------------------------------

    def lease(self, uint64_t offset, uint64_t nbytes) -> int:
        """Writes the head of a big block at `offset`. Returns its payload offset."""
        cdef shm_block *b = <shm_block *>(self.map.store + offset)
        b.bytes = nbytes
        b.lessee = NODE_SLOT
        b.big = 1
        STORE64(&b.owner, BLOCK_LEASED)
        return offset + BLOCK_ALIGN

    def lease_span(self, uint64_t offset) -> None:
        """The span is about to be leased; it cannot be revoked before its lessee has it."""
        cdef uint64_t at = offset // root_of(self.c).span_bytes
        cdef uint64_t *words = spans_of(self.c)
        if at < SPANS:
            STORE64(&words[at], SPAN_NEXT(LOAD64(&words[at]), 0) | SPAN_FIXED)

    def revoke_span(self, uint64_t offset) -> bool:
        """Takes a span from its living lessee, if none of it is in use."""
        return span_revoke(spans_of(self.c), self.map.store, root_of(self.c).span_bytes, offset)

    def block_owner(self, uint64_t payload) -> int:
        """0: free; 2**64-1: leased; otherwise the local id of its object."""
        return LOAD64(&block_of(self.map.store, payload).owner)

    def returns(self) -> list[int] | None:
        """Big blocks returned since the last call; None: too many, check all."""
        cdef shm_root *r = root_of(self.c)
        cdef uint64_t next = LOAD64(&r.returns_next), entry
        cdef list found = []
        cdef bint whole = not self.look_at_all and next - self.returns_seen <= RETURNS
        self.look_at_all = False
        while whole and self.returns_seen < next:
            entry = LOAD64(&r.returns[self.returns_seen % RETURNS])
            if entry % BLOCK_ALIGN != RETURN_LAP(self.returns_seen):
                whole = False  # overtaken, or its writer is slow or dead
            found.append(entry & ~<uint64_t>(BLOCK_ALIGN - 1))
            self.returns_seen += 1
        self.returns_seen = next
        return found if whole else None

    def reclaim_freed(self) -> int:
        """Returns the blocks of all FREED objects that their owners have not collected yet."""
        cdef unsigned t, word
        cdef shm_table *table
        cdef shm_header *h
        cdef uint64_t w, at, summary, bits, i
        cdef int n = 0
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            table = table_of(self.c, t)
            summary = LOAD64(&table.freed_summary)
            while summary:
                word = ctz(summary)
                summary &= summary - 1
                bits = LOAD64(&table.freed[word])
                while bits:
                    i = word * 64 + ctz(bits)
                    bits &= bits - 1
                    h = header_at(self.c, t, i)
                    w = LOAD64(&h.word)
                    if WORD_STATE(w) == ST_FREED or (WORD_STATE(w) == ST_DELETED
                                                     and mask_empty(h.pins)):
                        at = LOAD64(&h.block)  # read once: the owner may reuse the header
                        if at and not h.flags & (FLAG_INLINE | FLAG_RETURNED):
                            n += return_block(self.c, self.map.store, at,
                                              ID_MAKE(t, i, WORD_GENERATION(w)))
        return n

    def set_number(self, uint32_t number) -> None:
        """Sets this node's number in its cluster, for all labels."""
        STORE32(&client_of(self.c, NODE_SLOT).pool, number)

    @property
    def number(self) -> int:
        """This node's number in its cluster; 0 until it is set."""
        return LOAD32(&client_of(self.c, NODE_SLOT).pool)

    def set_hungry(self, bint hungry) -> None:
        STORE32(&root_of(self.c).hungry, hungry)

    def set_sleeping(self, bint sleeping) -> None:
        STORE32(&client_of(self.c, NODE_SLOT).sleeping, sleeping)

    def remove(self, uint64_t offset, uint64_t nbytes) -> None:
        """Returns the memory of a range of the store to the system. The address range stays."""
        cdef uint64_t page = <uint64_t>sysconf(_SC_PAGESIZE)
        cdef uint64_t begin = (offset + page - 1) & ~(page - 1), end = (offset + nbytes) & ~(page - 1)
        if end > begin:
            with nogil:
                madvise(self.map.store + begin, end - begin, MADV_REMOVE)

    def memory(self, uint64_t payload, uint64_t nbytes) -> memoryview:
        """Writable bytes of the store, for reading and writing the spill file."""
        cdef Block b = Block.__new__(Block)
        b.client = self
        b.payload = payload
        b.size = nbytes
        b.gone = True
        return memoryview(b)

    # -- spilling ------------------------------------------------------------------------------

    def spill_candidates(self) -> list[tuple[int, int, int, int]]:
        """(stamp, id, payload offset, payload bytes) of all sealed, unpinned objects."""
        cdef list found = []
        cdef unsigned t, i
        cdef shm_header *h
        cdef uint64_t w
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            for i in range(LOAD32(&table_of(self.c, t).high)):
                h = header_at(self.c, t, i)
                w = LOAD64(&h.word)
                if (WORD_STATE(w) == ST_SEALED and h.block and not h.flags & FLAG_INLINE
                        and mask_empty(h.pins)):
                    found.append((h.stamp, ID_MAKE(t, i, WORD_GENERATION(w)), h.block, h.size))
        return found

    def spill_begin(self, uint64_t oid) -> bool:
        """SEALED -> SPILLING, and back at once if the object is pinned."""
        if not change_state(self.c, oid, ST_SEALED, ST_SPILLING, -1, -1):
            return False
        if mask_empty(header_of(self.c, oid).pins):
            return True
        self.spill_abort(oid)
        return False

    def spill_abort(self, uint64_t oid) -> None:
        change_state(self.c, oid, ST_SPILLING, ST_SEALED, -1, -1)
        announce_done(self.c, oid)
        try_free(self.c, oid)

    def spill_end(self, uint64_t oid, uint64_t position) -> None:
        """The bytes are in the file: SPILLED; returns the block."""
        cdef shm_header *h = header_of(self.c, oid)
        cdef uint64_t payload = h.block
        h.spill = position + 1
        h.block = 0
        change_state(self.c, oid, ST_SPILLING, ST_SPILLED, -1, -1)
        return_block(self.c, self.map.store, payload, oid)
        announce_done(self.c, oid)
        try_free(self.c, oid)

    def finish_elsewhere(self, uint64_t oid, uint64_t nbytes, bint refs) -> bool:
        """CLAIMED by the node -> SPILLED: the whole value exists, but on another host, and
        restore() will bring its bytes. False: it was aborted meanwhile."""
        cdef shm_header *h = header_of(self.c, oid)
        self.check(oid)
        h.block = 0
        h.size = nbytes
        h.spill = 0
        if refs:
            OR8(&h.flags, FLAG_REFS)
        return finish(self.c, oid, NODE_SLOT, ST_SPILLED)

    def hand_over(self, uint64_t source, uint64_t oid) -> bool:
        """Moves the block of a SEALED object that only the node holds to a SPILLED object, which
        becomes SEALED. False: the first is being read, or the second is gone."""
        self.check(source)
        self.check(oid)
        cdef shm_header *s = header_of(self.c, source)
        cdef shm_header *h = header_of(self.c, oid)
        if s.flags & FLAG_INLINE or not self.spill_begin(source):
            return False
        if not change_state(self.c, oid, ST_SPILLED, ST_SPILLING, -1, -1):
            self.spill_abort(source)
            return False
        STORE64(&block_of(self.map.store, s.block).owner, oid)
        h.block = s.block
        h.size = s.size
        h.stamp = now_stamp()
        s.block = 0
        change_state(self.c, oid, ST_SPILLING, ST_SEALED, -1, -1)
        announce_done(self.c, oid)
        try_free(self.c, oid)
        change_state(self.c, source, ST_SPILLING, ST_SPILLED, -1, -1)
        announce_done(self.c, source)
        try_free(self.c, source)
        return True

    def restore(self, uint64_t oid, uint64_t payload, uint64_t nbytes=0, bint failed=False) -> bool:
        """SPILLED -> SPILLING -> SEALED over a LEASED block with the bytes. False: it is gone.
        `nbytes`: if the size has changed. `failed`: FAILED with an error in place of a lost
        value."""
        cdef shm_header *h = header_of(self.c, oid)
        # By way of SPILLING: under SPILLED, the location could be written into the header's next
        # object, if the last holder leaves now.
        if not change_state(self.c, oid, ST_SPILLED, ST_SPILLING, -1, -1):
            return False
        STORE64(&block_of(self.map.store, payload).owner, oid)
        h.block = payload
        if nbytes:
            h.size = nbytes
        h.stamp = now_stamp()
        change_state(self.c, oid, ST_SPILLING, ST_FAILED if failed else ST_SEALED, -1, -1)
        announce_done(self.c, oid)
        try_free(self.c, oid)
        return True
