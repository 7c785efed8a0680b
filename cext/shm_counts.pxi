# Counts and news for the node, without a scan of all headers.

cdef class _Counting(Client):
    """The part of NodeClient whose cost does not grow with the number of objects."""

    def objects(self) -> int:
        """Number of held, done objects of this host; counts 64 at a time."""
        cdef unsigned t, word
        cdef shm_table *table
        cdef uint64_t summary, bits
        cdef int64_t count = 0
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            table = table_of(self.c, t)
            if not LOAD32(&table.owner):
                continue
            for word in range((LOAD32(&table.high) + 63) // 64):
                count += popcount(LOAD64(&table.used[word]) & ~LOAD64(&table.open[word]))
            summary = LOAD64(&table.freed_summary)
            while summary:  # freed, and not collected by the owner yet
                word = ctz(summary)
                summary &= summary - 1
                bits = LOAD64(&table.freed[word])
                while bits:
                    count -= WORD_STATE(LOAD64(
                        &header_at(self.c, t, word * 64 + ctz(bits)).word)) == ST_FREED
                    bits &= bits - 1
        return max(0, count)

    def tasks_ended(self) -> tuple[int, int]:
        """(done, failed) tasks of all clients except the node."""
        cdef unsigned i
        cdef uint64_t done = 0, failed = 0
        for i in range(1, CLIENTS):
            done += client_of(self.c, i).tasks_done
            failed += client_of(self.c, i).tasks_failed
        return done, failed

    def mark_elsewhere(self, uint64_t oid) -> bool:
        """Makes take_gone() report this object when it is freed or deleted. False: it already
        was."""
        self.check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        OR8(&h.flags, FLAG_ELSEWHERE)
        # Changes the word: a process that read the flags earlier must read them again before it
        # frees.
        cdef uint64_t w = ADD64(&h.word, WORD_ACQUIRE_ONE)
        return WORD_GENERATION(w) == ID_GENERATION(oid) and WORD_STATE(w) in (
            ST_SPILLED, ST_SPILLING)

    def take_gone(self) -> list[int]:
        """Table and index (an id without its generation) of marked headers that were freed or
        deleted since the last call, and perhaps of others."""
        cdef list found = []
        cdef unsigned k, t, word
        cdef uint64_t tables, summary, bits
        cdef shm_table *table
        for k in range(TABLES // 64):
            if not LOAD64(&root_of(self.c).gone_tables[k]):
                continue
            tables = SWAP64(&root_of(self.c).gone_tables[k], 0)
            while tables:
                t = k * 64 + ctz(tables)
                tables &= tables - 1
                table = table_of(self.c, t)
                summary = SWAP64(&table.gone_summary, 0)
                while summary:
                    word = ctz(summary)
                    summary &= summary - 1
                    bits = SWAP64(&table.gone[word], 0)
                    while bits:
                        found.append(ID_MAKE(t, word * 64 + ctz(bits), 0) >> 32)
                        bits &= bits - 1
        return found


