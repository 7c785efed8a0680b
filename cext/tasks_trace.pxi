# The node's access to the tasks that clients run and have run.

EVENT_BYTES = sizeof(shm_event)
TRACED_EVENTS_MAX = TRACE_RING


@cython.final
cdef class Trace:
    """The node's access to all clients' stacks and rings. Events are returned as bytes, EVENT_BYTES
    each, with the layout of shm_layout.h."""
    cdef char *c
    cdef object keep
    cdef shm_event events[TRACE_RING]  # TRACE_OPEN is smaller

    def __cinit__(self, Tasks tasks):
        self.c = tasks.c
        self.keep = tasks

    def start(self) -> None:
        """Makes clients record their tasks from now on."""
        cdef unsigned slot
        for slot in range(CLIENTS):
            trace_of(self.c, slot).head = LOAD64(&trace_of(self.c, slot).tail)
        STORE32(&root_of(self.c).tracing, 1)

    def stop(self) -> None:
        STORE32(&root_of(self.c).tracing, 0)

    def waits(self, unsigned slot) -> bool:
        """Whether the ring should be emptied soon."""
        cdef shm_trace *t = self.of(slot)
        return LOAD64(&t.tail) - t.head >= TRACE_WAKE

    def take(self, unsigned slot) -> tuple[bytes, int]:
        """The events since the last call, and the number of lost events."""
        cdef uint64_t dropped = 0
        cdef unsigned count
        self.of(slot)
        count = trace_take(self.c, slot, self.events, &dropped)
        return PyBytes_FromStringAndSize(<char *>self.events, count * sizeof(shm_event)), dropped

    def open(self, unsigned slot) -> bytes:
        """The tasks that the client is running, the outermost first."""
        cdef unsigned count
        self.of(slot)
        count = trace_copy_open(self.c, slot, self.events)
        return PyBytes_FromStringAndSize(<char *>self.events, count * sizeof(shm_event))

    cdef shm_trace *of(self, unsigned slot) except NULL:
        if slot >= CLIENTS:
            raise ValueError(f"client slot {slot}: there are {CLIENTS}")
        return trace_of(self.c, slot)
