# Group boards: the node writes masks, members write call numbers, the leader commits.

from cpython.buffer cimport PyBUF_ND, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from "shm_board.h" nogil:
    enum:
        CALL_BARRIER
        CALL_BROADCAST
        CALL_KIND_COUNT
        TURN_OVER
    const char *call_kind_names[]
    struct reduce_kernel:
        pass
    const reduce_kernel *reduce_kernel_find(int, int)
    size_t reduce_source_bytes(const reduce_kernel *)
    size_t reduce_result_bytes(const reduce_kernel *)
    void wake_leaders(char *, shm_board *, uint64_t)
    int board_give(char *, char *, unsigned, unsigned, uint64_t, const shm_form *, const void *,
                   uint64_t)
    char *buffered_part(char *, char *, unsigned, unsigned, uint64_t)
    void board_fold(char *, char *, unsigned, uint64_t, uint64_t, const shm_form *, size_t, size_t,
                    void *)
    void board_copy(void *, const char *, size_t)
    int board_holds(char *, unsigned, unsigned, uint64_t, uint64_t)
    int forms_agree(const shm_form *, const shm_form *)
    int part_unchanged(shm_part *, uint64_t)
    int board_lead(char *, unsigned, unsigned, uint64_t)
    int board_wait(char *, unsigned, unsigned, unsigned, uint64_t, uint64_t)

CALL_KINDS = tuple([call_kind_names[i].decode() for i in range(CALL_KIND_COUNT)])
BOARD_BYTES_MAX, BOARD_DIMS_MAX = PART_BYTES_MAX, PART_DIMS_MAX
BUFFER_HEAD_BYTES = sizeof(shm_form)  # of each call buffer, before the elements
include "tasks_coll.pxi"

@cython.final
cdef class Board:
    """One Group's board, for one member or the node."""
    cdef char *c
    cdef char *store
    cdef readonly int giving  # threads that write to a buffer
    cdef object keep
    cdef shm_board *b
    cdef readonly unsigned index
    cdef unsigned slot

    def __cinit__(self, Tasks tasks, unsigned index):
        if index >= BOARDS:
            raise ValueError(f"board {index}: there are {BOARDS}")
        self.c = tasks.c
        self.keep = tasks
        self.index = index
        self.slot = tasks.slot
        self.b = board_of(self.c, index)

    # -- the node ------------------------------------------------------------------------------

    def reset(self, uint32_t size, uint64_t generation) -> None:
        memset(self.b, 0, sizeof(shm_board))
        memset(<void *> coll_of(self.c, self.index), 0, COLL_HEAD_BYTES)
        self.b.size = size
        self.b.generation = generation
        STORE32(&self.b.used, 1)

    def set_client(self, unsigned rank, unsigned client) -> None:
        """Sets the client to wake for that rank."""
        STORE64(&self.b.members[rank].client, client + 1)

    def set_masks(self, uint64_t alive, uint64_t joining, bint formed, bint start=True) -> None:
        """Changes the membership, and wakes every member.

        A rank without a first call gets the first call that no rank has begun. While the epoch is
        odd no leader decides, so the leader of that call includes the rank. `start` False: members
        are also on other hosts, and set_start gives a rank's first call.
        """
        cdef unsigned rank
        cdef uint64_t members = alive | joining
        cdef uint64_t fresh = members & ~(self.b.alive | self.b.joining)
        # the first call that no rank has begun; ranks may be at different calls
        cdef uint64_t first
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
        """Sets the first call of a rank, if it has none. Wakes every member."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        if LOAD64(&self.b.members[rank].start) == 0:
            STORE64(&self.b.members[rank].start, call + 1)
        self.wake()

    def announce(self, unsigned rank) -> None:
        """Announces news about messages to that rank, and wakes it."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        ADD64(&self.b.members[rank].news, 1)
        if self.b.members[rank].client:
            wake_client(self.c, <unsigned>(self.b.members[rank].client - 1))

    # -- members -------------------------------------------------------------------------------

    def news(self, unsigned rank) -> int:
        """Counts the news about messages to that rank."""
        return LOAD64(&self.b.members[rank].news) if rank < MEMBERS else 0

    def wake(self) -> None:
        cdef unsigned rank
        for rank in range(MEMBERS):
            if self.b.members[rank].client:
                wake_client(self.c, <unsigned>(self.b.members[rank].client - 1))

    def look(self) -> tuple:
        """(formed, alive, joining, epoch, result call + 1, result id)."""
        # first: an equal value afterwards means that nothing has changed
        cdef uint32_t epoch = LOAD32(&self.b.epoch)
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

    def holds(self, unsigned rank, uint64_t client, uint64_t generation) -> int:
        """1: that client is still the member of that rank, so the result that was read is that of
        its call. 0: it is not. -1: the node is changing the members; call again."""
        return board_holds(self.c, self.index, rank, client, generation) if rank < MEMBERS else 0

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
        """Publishes this rank's part of `call`, and wakes the call's leader."""
        STORE64(&self.b.members[rank].contribution, contribution)
        STORE64(&self.b.members[rank].seq, call + 1)
        wake_leaders(self.c, self.b, call)

    def commit(self, uint64_t call, uint64_t result) -> None:
        """The leader's decision: writes the id first, then the call number, which is the commit."""
        STORE64(&self.b.result_id, result)
        STORE64(&self.b.result_call, call + 1)
        self.wake()

    # -- calls with parts on the board, or in call buffers ------------------------------------------

    def set_store(self, size_t address, keep) -> None:
        """Sets the address of the store in this process, valid while it has `keep`."""
        self.store = <char *>address
        self.keep = self.keep, keep

    def leave_store(self) -> None:
        """The member leaves: no buffer may be read or written from now on."""
        self.store = NULL

    def make(self, unsigned rank, uint64_t call, int kind, int op, unsigned root, int dtype, x,
             uint64_t buffer, uint64_t wait_ns, uint64_t deadline_ns) -> int:
        """Publishes this rank's part of a call, a C-contiguous array or None, then waits for the
        end of the call, for `wait_ns` or until the deadline. buffer: the offset in the store of the
        part's call buffer; 0: the part is on the board. Returns the ranks in the result as a mask;
        the caller reads the result with `fold`, `copy` or `result`. 0: the call has not ended, or
        has ended in another way, so the caller must check the board. -1: nothing was published, so
        the part must become an object."""
        cdef shm_form form
        cdef Py_buffer view
        cdef int turn, given, i
        cdef shm_part *result = part_of(self.c, self.index, MEMBERS)
        if rank >= MEMBERS or root >= MEMBERS:
            raise ValueError(f"ranks {rank} and {root}: a board has {MEMBERS}")
        cdef char *store = self.store
        if buffer and store == NULL:
            return -1  # the member is leaving
        memset(&form, 0, sizeof(form))
        form.kind, form.op, form.dtype, form.root = kind, op, dtype, root
        form.buffered = buffer != 0 or kind >= CALL_BROADCAST
        if x is None:
            given = board_give(self.c, store, self.index, rank, call, &form, NULL, 0)
        else:
            PyObject_GetBuffer(x, &view, PyBUF_ND)
            try:
                if view.ndim > PART_DIMS_MAX:
                    return -1
                form.nbytes, form.ndim = view.len, view.ndim
                for i in range(view.ndim):
                    form.shape[i] = view.shape[i]
                if kind < CALL_BROADCAST and reduce_kernel_find(op, dtype) == NULL:
                    return -1
                if not form.buffered and max(form.nbytes, result_bytes(&form)) > PART_BYTES_MAX:
                    return -1
                self.giving += 1
                with nogil:
                    given = board_give(self.c, store, self.index, rank, call, &form, view.buf,
                                       buffer)
                self.giving -= 1
            finally:
                PyBuffer_Release(&view)
        if not given:
            return -1
        deadline_ns = min(deadline_ns, now_ns() + wait_ns)
        with nogil:
            turn = board_wait(self.c, self.index, self.slot, rank, call, deadline_ns)
        return result.mask if turn == TURN_OVER and forms_agree(&result.form, &form) else 0

    def fold(self, uint64_t call, size_t first, out) -> None:
        """Fills `out`, a C-contiguous array, with the reduction of these elements of all parts of
        `call`, which are in buffers."""
        cdef Py_buffer view
        cdef shm_part *result = part_of(self.c, self.index, MEMBERS)
        cdef shm_form form = result.form
        cdef uint64_t mask = result.mask
        cdef const reduce_kernel *kernel = reduce_kernel_find(form.op, form.dtype)
        cdef char *store = self.mapped()
        cdef size_t count
        if kernel == NULL:
            raise ValueError(f"parts of operator {form.op} and dtype {form.dtype} cannot be folded")
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        try:
            count = view.len // reduce_result_bytes(kernel)
            if not form.buffered or (first + count) * reduce_source_bytes(kernel) > form.nbytes:
                raise ValueError(f"{count} elements from {first} on exceed the part")
            with nogil:
                board_fold(self.c, store, self.index, call, mask, &form, first, count, view.buf)
        finally:
            PyBuffer_Release(&view)

    def contributors(self) -> int:
        """The ranks, as a mask, in the result of the latest call that was committed without
        objects. The next call of all members replaces it."""
        return part_of(self.c, self.index, MEMBERS).mask

    def result_form(self) -> tuple[tuple[int, ...], int, int, bool]:
        """(shape, dtype and operator of the parts, whether they are in buffers) of that call."""
        cdef shm_form *form = &part_of(self.c, self.index, MEMBERS).form
        return (tuple([form.shape[i] for i in range(form.ndim)]), form.dtype, form.op,
                form.buffered != 0)

    def result(self, out) -> None:
        """Fills `out`, a C-contiguous array, with a result on the board."""
        cdef Py_buffer view
        cdef shm_part *result = part_of(self.c, self.index, MEMBERS)
        cdef size_t nbytes = result_bytes(&result.form)
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        try:
            if result.form.buffered or view.len != <Py_ssize_t>nbytes:
                raise ValueError(f"the result has {nbytes} bytes, and `out` {view.len}")
            memcpy(view.buf, result.data, nbytes)
        finally:
            PyBuffer_Release(&view)

    def buffered(self, unsigned rank, uint64_t call) -> tuple[int, tuple[int, ...], int]:
        """(dtype as a number, shape, bytes) of a rank's part of `call` in its buffer."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        cdef shm_form *form = <shm_form *>buffered_part(
            self.c, self.mapped(), self.index, rank, call) - 1
        # read once, because the memory may have another owner by now
        cdef unsigned ndim = form.ndim
        if ndim > PART_DIMS_MAX:
            raise ValueError(f"rank {rank}'s part of call {call} has {ndim} dimensions")
        return form.dtype, tuple([form.shape[i] for i in range(ndim)]), form.nbytes

    def copy(self, unsigned rank, uint64_t call, out) -> None:
        """Fills `out`, a C-contiguous array, with a rank's part of `call` in its buffer."""
        cdef Py_buffer view
        cdef char *part
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        part = buffered_part(self.c, self.mapped(), self.index, rank, call)
        PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        try:
            if <uint64_t>view.len != (<shm_form *>part - 1).nbytes:
                raise ValueError(f"the part does not have {view.len} bytes")
            with nogil:
                board_copy(view.buf, part, view.len)
        finally:
            PyBuffer_Release(&view)

    cdef char *mapped(self) except NULL:
        """The store, in which other ranks' buffers are read."""
        if self.store == NULL:
            raise ValueError("this member has left")
        return self.store

    def lead(self, unsigned rank, uint64_t call) -> bool:
        """Leads a small call, if this rank must, and all parts are present and on the board. True:
        committed."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        return board_lead(self.c, self.index, rank, call) == TURN_OVER

    def part(self, unsigned rank) -> tuple | None:
        """A rank's published part, or (MEMBERS_MAX) the result: (kind, op, root, dtype, shape,
        bytes, mask), the first ones as numbers. No bytes for a result whose parts are in buffers.
        None: it is being written."""
        if rank > MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        cdef shm_part *p = part_of(self.c, self.index, rank)
        cdef uint64_t changes = LOAD64(&p.changes)
        cdef shm_form form = p.form
        cdef uint64_t nbytes = form.nbytes
        cdef char *data = <char *>p.data
        if changes & 1 or not part_unchanged(p, changes):
            return None
        if rank == MEMBERS:
            nbytes = 0 if form.buffered else result_bytes(&form)
        elif form.buffered and nbytes:
            data = buffered_part(self.c, self.mapped(), self.index, rank,
                                 LOAD64(&self.b.members[rank].seq) - 1)
        shape = tuple([form.shape[i] for i in range(form.ndim)])
        content = PyBytes_FromStringAndSize(data, <Py_ssize_t>nbytes)
        if not part_unchanged(p, changes):
            return None
        return form.kind, form.op, form.root, form.dtype, shape, content, p.mask


cdef size_t result_bytes(const shm_form *form) noexcept:
    """Size of a reduction's result; 0 for a barrier's."""
    cdef const reduce_kernel *kernel = reduce_kernel_find(form.op, form.dtype)
    if form.kind == CALL_BARRIER or kernel == NULL:
        return 0
    return form.nbytes // reduce_source_bytes(kernel) * reduce_result_bytes(kernel)
