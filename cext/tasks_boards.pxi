# Group boards: masks by the node, call numbers by the members, the commit by the leader.

from cpython.buffer cimport PyBUF_ND, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from "shm_board.h" nogil:
    enum:
        BOARD_BARRIER
        BOARD_ALLREDUCE
        BOARD_REDUCE
        TURN_OVER
        REDUCE_SUM
        REDUCE_PROD
        REDUCE_MIN
        REDUCE_MAX
        REDUCE_MEAN
        REDUCE_AND
        REDUCE_OR
        REDUCE_XOR
        REDUCE_BOOL
        REDUCE_INT8
        REDUCE_INT16
        REDUCE_INT32
        REDUCE_INT64
        REDUCE_UINT8
        REDUCE_UINT16
        REDUCE_UINT32
        REDUCE_UINT64
        REDUCE_FLOAT16
        REDUCE_FLOAT32
        REDUCE_FLOAT64
        REDUCE_COMPLEX64
        REDUCE_COMPLEX128
    struct reduce_kernel:
        pass
    const reduce_kernel *reduce_kernel_find(int, int)
    size_t reduce_source_bytes(const reduce_kernel *)
    size_t reduce_result_bytes(const reduce_kernel *)
    void wake_leaders(char *, shm_board *, uint64_t)
    void board_give(char *, unsigned, unsigned, uint64_t, const shm_form *, const void *)
    int part_unchanged(shm_part *, uint64_t)
    int board_lead(char *, unsigned, unsigned, uint64_t)
    int board_wait(char *, unsigned, unsigned, unsigned, uint64_t, uint64_t)

from libc.string cimport memcmp

# What a small call may be: kinds, operators and dtypes by name.
BOARD_KINDS = {"barrier": BOARD_BARRIER, "allreduce": BOARD_ALLREDUCE, "reduce": BOARD_REDUCE}
BOARD_OPS = {"sum": REDUCE_SUM, "prod": REDUCE_PROD, "min": REDUCE_MIN, "max": REDUCE_MAX,
             "mean": REDUCE_MEAN, "and": REDUCE_AND, "or": REDUCE_OR, "xor": REDUCE_XOR}
BOARD_DTYPES = {
    "bool": REDUCE_BOOL, "int8": REDUCE_INT8, "int16": REDUCE_INT16, "int32": REDUCE_INT32,
    "int64": REDUCE_INT64, "uint8": REDUCE_UINT8, "uint16": REDUCE_UINT16,
    "uint32": REDUCE_UINT32, "uint64": REDUCE_UINT64, "float16": REDUCE_FLOAT16,
    "float32": REDUCE_FLOAT32, "float64": REDUCE_FLOAT64, "complex64": REDUCE_COMPLEX64,
    "complex128": REDUCE_COMPLEX128}
BOARD_BYTES_MAX, BOARD_DIMS_MAX = PART_BYTES_MAX, PART_DIMS_MAX
include "tasks_small.pxi"

@cython.final
cdef class Board:
    """One Group's board as one member (or the node) sees it."""
    cdef char *c
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
        memset(<void *> small_of(self.c, self.index), 0, SMALL_HEAD_BYTES)
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
        """This rank's part of `call` is there; wakes whoever leads it."""
        STORE64(&self.b.members[rank].contribution, contribution)
        STORE64(&self.b.members[rank].seq, call + 1)
        wake_leaders(self.c, self.b, call)

    def commit(self, uint64_t call, uint64_t result) -> None:
        """The leader's decision: the id first, then the call number, which is the commit."""
        STORE64(&self.b.result_id, result)
        STORE64(&self.b.result_call, call + 1)
        self.wake()

    # -- small calls, which lie on the board -----------------------------------------------------

    def small(self, unsigned rank, uint64_t call, int kind, int op, unsigned root, int dtype, x,
              out, uint64_t deadline_ns) -> int:
        """Publishes this rank's part of a small call, a C-contiguous array or None, and waits for
        its end. Returns the ranks in the result as a mask, and fills `out`, which is a C-contiguous
        array of the result or None; 0: the call is not over in time, or not by a small result, so
        the caller has to look at the board. -1: nothing was published, it is none for the board."""
        cdef shm_form form
        cdef Py_buffer view
        cdef const reduce_kernel *kernel = NULL
        cdef size_t nbytes = 0
        cdef int turn, i
        cdef shm_part *result = part_of(self.c, self.index, MEMBERS)
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        memset(&form, 0, sizeof(form))
        form.kind, form.op, form.dtype, form.root = kind, op, dtype, root
        if x is None:
            board_give(self.c, self.index, rank, call, &form, NULL)
        else:
            kernel = reduce_kernel_find(op, dtype)
            if kernel == NULL:
                return -1
            PyObject_GetBuffer(x, &view, PyBUF_ND)
            try:
                nbytes = view.len // reduce_source_bytes(kernel) * reduce_result_bytes(kernel)
                if view.len > PART_BYTES_MAX or nbytes > PART_BYTES_MAX or view.ndim > PART_DIMS_MAX:
                    return -1
                form.nbytes, form.ndim = view.len, view.ndim
                for i in range(view.ndim):
                    form.shape[i] = view.shape[i]
                board_give(self.c, self.index, rank, call, &form, view.buf)
            finally:
                PyBuffer_Release(&view)
        with nogil:
            turn = board_wait(self.c, self.index, self.slot, rank, call, deadline_ns)
        if turn != TURN_OVER or memcmp(&result.form, &form, sizeof(form)):
            return 0
        if out is not None and nbytes:
            PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
            if view.len == <Py_ssize_t>nbytes:
                memcpy(view.buf, result.data, nbytes)
            PyBuffer_Release(&view)
            if view.len != <Py_ssize_t>nbytes:
                raise ValueError(f"the result has {nbytes} bytes, and `out` {view.len}")
        return result.mask

    def lead(self, unsigned rank, uint64_t call) -> bool:
        """Leads a small call, if this rank has to, and all parts are there, and lie on the board.
        True: it is committed."""
        if rank >= MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        return board_lead(self.c, self.index, rank, call) == TURN_OVER

    def part(self, unsigned rank) -> tuple | None:
        """What lies on the board of that rank, or (MEMBERS_MAX) of the result: (kind, op, root,
        dtype, shape, bytes, mask), the first ones as numbers. None: somebody is writing it."""
        if rank > MEMBERS:
            raise ValueError(f"rank {rank}: a board has {MEMBERS}")
        cdef shm_part *p = part_of(self.c, self.index, rank)
        cdef uint64_t changes = LOAD64(&p.changes)
        cdef shm_form form = p.form
        cdef const reduce_kernel *kernel = reduce_kernel_find(form.op, form.dtype)
        cdef uint64_t nbytes = form.nbytes
        if changes & 1 or form.ndim > PART_DIMS_MAX or nbytes > PART_BYTES_MAX:
            return None
        if rank == MEMBERS and nbytes:
            nbytes = nbytes // reduce_source_bytes(kernel) * reduce_result_bytes(kernel)
        shape = tuple([form.shape[i] for i in range(form.ndim)])
        data = PyBytes_FromStringAndSize(<char *>p.data, <Py_ssize_t>nbytes)
        if not part_unchanged(p, changes):
            return None
        return form.kind, form.op, form.root, form.dtype, shape, data, p.mask
