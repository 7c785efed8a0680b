# An Engine's records of cells and links: translates numbers into structures, and holds buffers.


cdef int read_key(object key, frame_key *into) except -1:
    operation, epoch, stripe, part = key
    if not 0 <= operation <= UINT64_MAX:
        raise ValueError(f"operation {operation} does not fit 64 bits")
    for word in (epoch, stripe, part):
        if not 0 <= word <= UINT32_MAX:
            raise ValueError(f"{word} in the key {key!r} does not fit 32 bits")
    into.operation = operation
    into.epoch = epoch
    into.stripe = stripe
    into.part = part
    return 0


cdef uint64_t bytes_there(object filled, uint64_t size) except? 1:
    """The number of present bytes of a cell of that size."""
    watermark = (size if filled else 0) if isinstance(filled, bool) else filled
    if not 0 <= watermark <= size:
        raise ValueError(f"filled must be from 0 to {size} bytes, not {watermark}")
    return watermark


@cython.no_gc
@cython.final
cdef class _Held:
    """A cell and its buffer, until the thread has released both."""

    cdef cell_t *cell
    cdef Py_buffer buffer
    cdef object key
    cdef bint open, has_buffer

    cdef int hold(self, object buffer, Py_ssize_t offset, bint only_read) except -1:
        """Holds the buffer. Checks that the offset is inside."""
        PyObject_GetBuffer(buffer, &self.buffer, PyBUF_SIMPLE if only_read else PyBUF_WRITABLE)
        self.has_buffer = True
        if not 0 <= offset <= self.buffer.len:
            raise ValueError(f"offset {offset} exceeds a buffer of {self.buffer.len} bytes")
        return 0

    cdef int check_writable(self) except -1:
        if self.buffer.readonly:
            raise ValueError("the cell is in read-only memory")
        return 0

    cdef void let_go(self) noexcept:
        if self.has_buffer:
            PyBuffer_Release(&self.buffer)
        self.has_buffer = False

    def __getbuffer__(self, Py_buffer *view, int flags):
        PyBuffer_FillInfo(view, self, self.cell.bytes, self.cell.nbytes, self.buffer.readonly,
                          flags)

    def __dealloc__(self):
        self.let_go()
        if self.cell != NULL:
            cell_free(self.cell)


@cython.final
cdef class _Joined:
    """A link."""

    cdef link_t *link
    cdef bint driven, lost  # it has a Driver; LINK_LOST was taken


cdef uint64_t watermark_of(_Held held) noexcept:
    return atomic_load_explicit(&held.cell.watermark, memory_order_acquire)
