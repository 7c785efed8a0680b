# Concurrent tasks of one worker, and the links of streams.

cdef extern from "shm_concurrent.h" nogil:
    enum:
        KIND_STREAM
        RECORD_ASYNC
    uint64_t next_concurrent(char *, unsigned, unsigned, unsigned, uint64_t, int, uint32_t, uint64_t)
    void trace_push_concurrent(char *, unsigned, uint64_t, const char *, uint64_t)
    void trace_remove(char *, unsigned, uint64_t, unsigned)

STREAM_LINK = KIND_STREAM
ASYNC_FLAG = RECORD_ASYNC


@cython.final
cdef class ConcurrentSlots:
    """A worker's state of its concurrent tasks, or of a stream."""
    cdef char *c
    cdef Tasks tasks
    cdef unsigned slot

    def __cinit__(self, Tasks tasks):
        self.c = tasks.c
        self.tasks = tasks
        self.slot = tasks.slot

    @property
    def called(self) -> bool:
        """Whether this worker's node has something to run between two tasks (`Cluster.run`)."""
        return LOAD32(&client_of(self.c, self.slot).retire) & 2

    def word(self) -> int:
        """Read it before checking for ended tasks; pass it to next() afterwards."""
        return LOAD32(&client_of(self.c, self.slot).task)

    def next(self, unsigned pool, unsigned running, uint64_t output_owner, bint any, uint32_t seen,
             uint64_t timeout_ns) -> int:
        """Waits for an async task that may run with this many others, and claims it. `any`: any
        task of the pool. 0: none came, or this worker was woken: check and call again."""
        cdef uint64_t oid
        with nogil:
            oid = next_concurrent(self.c, pool, self.slot, running, output_owner, any, seen,
                              now_ns() + timeout_ns)
        if not oid:
            check_signals()
        return oid

    def wake(self) -> None:
        """Makes this worker's next(), in another thread, return."""
        wake_for_task(self.c, self.slot)

    def begin(self, uint64_t oid) -> None:
        """Begins a concurrent task."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        r.started_ns = now_ns()
        with cython.critical_section(self.tasks):
            STORE64(&client_of(self.c, self.slot).running, oid)
            trace_push_concurrent(self.c, self.slot, oid, r.name, r.started_ns)

    def end(self, uint64_t oid, int failed, uint64_t running) -> None:
        """Ends a task. `running`: one of the remaining tasks, or 0. failed -1: it is retried."""
        cdef shm_client *me = client_of(self.c, self.slot)
        with cython.critical_section(self.tasks):
            trace_remove(self.c, self.slot, oid, OUTCOME_CANCELLED if self.tasks.void_task == oid
                         else OUTCOME_FAILED if failed else OUTCOME_DONE)
            set_running(self.c, self.slot, running)
            if failed > 0:
                me.tasks_failed += 1
            elif not failed:
                me.tasks_done += 1

    def deadline(self, uint64_t oid, uint64_t at_ns) -> None:
        """Sets when this process is killed because of that task; 0: never."""
        cdef shm_client *me = client_of(self.c, self.slot)
        STORE64(&me.deadline_ns, 0)
        if at_ns:
            STORE64(&me.deadline_id, oid)
            STORE64(&me.deadline_ns, at_ns)
            wake_node(self.c)

    def link(self, uint64_t oid, bytes name, unsigned tries, uint64_t output_owner,
             uint64_t timeout_ns) -> None:
        """A new link of the running task's stream, claimed by this client and now the running task.
        Its record has the data for error messages, because the task itself is done."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        memset(r.name, 0, NAME_BYTES)
        memcpy(r.name, PyBytes_AS_STRING(name), min(PyBytes_GET_SIZE(name), NAME_BYTES))
        r.output_owner = output_owner
        r.timeout_ns = timeout_ns
        r.tries = <uint16_t>tries
        r.retries_left = 0
        r.flags = 0
        STORE64(&client_of(self.c, self.slot).running, oid)

    def alone(self, uint64_t oid) -> bool:
        """Whether only this client holds the object."""
        check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        cdef uint64_t own
        cdef int i
        for i in range(MASK_WORDS):
            own = 1ULL << (self.slot % 64) if i == self.slot // 64 else 0
            if LOAD64(&h.refs[i]) & ~own:
                return False
        return True

    def size(self, uint64_t oid) -> int:
        """Bytes of an object's payload."""
        check(oid)
        return header_of(self.c, oid).size
