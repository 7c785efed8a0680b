# Group boards: masks by the node, call numbers by the members, the commit by the leader.

@cython.final
cdef class Board:
    """One Group's board as one member (or the node) sees it."""
    cdef char *c
    cdef object keep
    cdef shm_board *b
    cdef readonly unsigned index

    def __cinit__(self, Tasks tasks, unsigned index):
        if index >= BOARDS:
            raise ValueError(f"board {index}: there are {BOARDS}")
        self.c = tasks.c
        self.keep = tasks
        self.index = index
        self.b = board_of(self.c, index)

    # -- the node ------------------------------------------------------------------------------

    def reset(self, uint32_t size, uint64_t generation) -> None:
        memset(self.b, 0, sizeof(shm_board))
        self.b.size = size
        self.b.generation = generation
        STORE32(&self.b.used, 1)

    def set_client(self, unsigned rank, unsigned client) -> None:
        """Who is to be woken for that rank."""
        STORE64(&self.b.members[rank].client, client + 1)

    def set_masks(self, uint64_t alive, uint64_t joining, bint formed, bint start=True) -> None:
        """Changes the membership and wakes every member.

        A rank that has no first call yet gets the first one that nobody has begun. While the epoch
        is odd no leader decides, so whoever leads that call counts on the rank. `start` False:
        members are also on other hosts, and set_start says which call is a rank's first.
        """
        cdef unsigned rank
        cdef uint64_t members = alive | joining
        cdef uint64_t fresh = members & ~(self.b.alive | self.b.joining)
        cdef uint64_t first  # the call that nobody has begun; not all need to be at the same one
        cdef shm_member *m
        ADD32(&self.b.epoch, 1)
        first = LOAD64(&self.b.result_call)
        for rank in range(MEMBERS):
            m = &self.b.members[rank]
            if fresh >> rank & 1:
                m.seq = m.start = m.contribution = 0
            elif members >> rank & 1:
                first = max(first, LOAD64(&m.seq))
        for rank in range(MEMBERS):
            m = &self.b.members[rank]
            if start and formed and members >> rank & 1 and LOAD64(&m.start) == 0:
                STORE64(&m.start, first + 1)
        STORE64(&self.b.joining, joining)
        STORE64(&self.b.alive, alive)
        STORE32(&self.b.formed, formed)
        ADD32(&self.b.epoch, 1)
        self.wake()

    def set_start(self, unsigned rank, uint64_t call) -> None:
        """The first call of a rank, if it has none yet; wakes every member."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        if LOAD64(&self.b.members[rank].start) == 0:
            STORE64(&self.b.members[rank].start, call + 1)
        self.wake()

    def announce(self, unsigned rank) -> None:
        """There is news about messages to that rank; wakes it."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        ADD64(&self.b.members[rank].news, 1)
        if self.b.members[rank].client:
            wake_client(self.c, <unsigned>(self.b.members[rank].client - 1))

    # -- members -------------------------------------------------------------------------------

    def news(self, unsigned rank) -> int:
        """How often there was news about messages to that rank."""
        return LOAD64(&self.b.members[rank].news) if rank < MEMBERS else 0

    def wake(self) -> None:
        cdef unsigned rank
        for rank in range(MEMBERS):
            if self.b.members[rank].client:
                wake_client(self.c, <unsigned>(self.b.members[rank].client - 1))

    def look(self) -> tuple:
        """(formed, alive, joining, epoch, result call + 1, result id)."""
        cdef uint32_t epoch = LOAD32(&self.b.epoch)  # first: the same after means nothing changed
        cdef uint64_t call = LOAD64(&self.b.result_call)
        return (LOAD32(&self.b.formed) != 0, LOAD64(&self.b.alive), LOAD64(&self.b.joining),
                epoch, call, LOAD64(&self.b.result_id))

    def generation(self) -> int:
        return LOAD64(&self.b.generation)

    def member(self, unsigned rank) -> tuple:
        """(seq, start, contribution, client slot or -1)."""
        cdef shm_member *m = &self.b.members[rank]
        cdef uint64_t seq = LOAD64(&m.seq)
        return (seq, LOAD64(&m.start), LOAD64(&m.contribution), <int64_t>m.client - 1)

    def missing(self, uint64_t alive, uint64_t call) -> int:
        """Mask of the ranks among `alive` that take part in `call` and have not published it."""
        cdef uint64_t mask = 0
        cdef unsigned rank
        cdef shm_member *m
        for rank in range(MEMBERS):
            if alive >> rank & 1:
                m = &self.b.members[rank]
                if 0 < LOAD64(&m.start) <= call + 1 and LOAD64(&m.seq) < call + 1:
                    mask |= 1ULL << rank
        return mask

    def publish(self, unsigned rank, uint64_t call, uint64_t contribution) -> None:
        """This rank's part of `call` is there; wakes the others."""
        STORE64(&self.b.members[rank].contribution, contribution)
        STORE64(&self.b.members[rank].seq, call + 1)
        self.wake()

    def commit(self, uint64_t call, uint64_t result) -> None:
        """The leader's decision: the id first, then the call number, which is the commit."""
        STORE64(&self.b.result_id, result)
        STORE64(&self.b.result_call, call + 1)
        self.wake()
