# Small calls of a Group over several hosts, for members: see shm_coll in shm_layout.h.

cdef extern from "shm_layout.h" nogil:
    enum:
        COLL_RECORD_BYTES
        COLL_HEAD_BYTES
    ctypedef struct shm_coll_part:
        uint64_t seq
        uint32_t nbytes, offset
        uint8_t kind, op, dtype, root
    ctypedef struct shm_coll:
        uint64_t open, done
        shm_coll_part *parts
        char *given
        char *record
    shm_coll *coll_of(char *, unsigned)
    uint32_t coll_share(uint32_t)

cdef extern from "engine_coll.h" nogil:
    cdef struct coll_record:
        uint64_t call, ranks
        uint8_t kind, op, dtype, root
        uint32_t count, nbytes
    cdef struct coll_place:
        uint32_t source, nbytes, at


@cython.final
cdef class CollectiveBoard:
    """The part of a board that members share with the engine's thread."""
    cdef char *c
    cdef object keep
    cdef shm_coll *b

    def __cinit__(self, Tasks tasks, unsigned index):
        if index >= BOARDS:
            raise ValueError(f"board {index}: there are {BOARDS}")
        self.c = tasks.c
        self.keep = tasks
        self.b = coll_of(self.c, index)

    def set_open(self, bint is_open) -> None:
        """For the node: whether members may expect that small calls stay in compiled code."""
        STORE64(&self.b.open, is_open)

    def is_open(self) -> bool:
        return LOAD64(&self.b.open) != 0

    def give(self, unsigned rank, uint32_t size, uint64_t call, tuple about, bytes head,
             uint32_t offset, const unsigned char[::1] elements) -> bool:
        """Writes this rank's payload for `call`: `head`, then `elements` at `offset` (None: only
        the head). `about`: (kind, op, dtype, root). False: it is too large. The caller rings the
        doorbell."""
        cdef uint32_t nbytes = <uint32_t> PyBytes_GET_SIZE(head)
        cdef uint32_t length = nbytes if elements is None else \
            offset + <uint32_t> min(elements.shape[0], <Py_ssize_t> COLL_RECORD_BYTES)
        cdef uint32_t share = coll_share(size)
        cdef shm_coll_part *part
        cdef char *place
        if rank >= MEMBERS or rank >= size or offset > length or length > share:
            return False
        part = &self.b.parts[rank]
        place = self.b.given + <size_t> rank * share
        memcpy(place, PyBytes_AS_STRING(head), nbytes)
        if elements is not None:
            memset(place + nbytes, 0, offset - nbytes)
            if elements.shape[0]:
                memcpy(place + offset, &elements[0], elements.shape[0])
        part.nbytes = length
        part.offset = offset
        part.kind, part.op, part.dtype, part.root = about
        STORE64(&part.seq, call + 1)
        return True

    def given(self, unsigned rank) -> int:
        """The last call to which that rank has given here, + 1."""
        return LOAD64(&self.b.parts[rank].seq) if rank < MEMBERS else 0

    def done(self) -> int:
        """The last call that was committed here, + 1."""
        return LOAD64(&self.b.done)

    def record(self) -> bytes:
        """The call's record, for read_record(). It is complete for a member of this host that has
        not given to the next call."""
        cdef coll_record *record = <coll_record *> self.b.record
        return PyBytes_FromStringAndSize(self.b.record,
                                         min(record.nbytes, <uint32_t> COLL_RECORD_BYTES))


def read_record(const unsigned char[::1] record) -> tuple:
    """(call, ranks as bits, kind, op, dtype, root, {source: payload}) of a small call. The numbers
    of kind, op and dtype are those of call_kind and reduce_kernels.h."""
    cdef coll_record head
    cdef coll_place place
    cdef Py_ssize_t size = record.shape[0]
    cdef Py_ssize_t at = sizeof(coll_record)
    cdef uint32_t i
    cdef dict found = {}
    if size < at:
        raise ValueError("not a record of a small call")
    memcpy(&head, &record[0], sizeof(coll_record))
    for i in range(head.count):
        if at + <Py_ssize_t> sizeof(coll_place) > size:
            raise ValueError("a record of a small call ends too early")
        memcpy(&place, &record[at], sizeof(coll_place))
        at += sizeof(coll_place)
        if place.at + <uint64_t> place.nbytes > <uint64_t> size:
            raise ValueError("a record of a small call ends too early")
        found[place.source] = PyBytes_FromStringAndSize(
            <const char *> &record[0] + place.at, place.nbytes)
    return head.call, head.ranks, head.kind, head.op, head.dtype, head.root, found
