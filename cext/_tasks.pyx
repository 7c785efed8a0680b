"""Tasks in shared memory: records, claims, hints, completions, waits; and Group boards.

A submit, a claim and a completion write words in shared memory, without a message. This file
provides these operations to Python, and waits without the GIL.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy, memset

cimport cython

include "shm_layout.pxi"
include "tasks_declarations.pxi"

ARGS_INLINE_BYTES, FOREVER_NS = ARGS_INLINE, 1 << 62
DONE, NEWS, TIMEOUT, CLOSING = WAIT_DONE, WAIT_NEWS, WAIT_TIMEOUT, WAIT_CLOSING
QUEUED_HINTS_MAX, MEMBERS_MAX = RING, MEMBERS
DELAYED_FLAG = RECORD_DELAYED


cdef inline int check(uint64_t oid) except -1:
    if not id_valid(oid):
        raise ValueError(f"{oid:#x} is not a local id")
    return 0


@cython.final
cdef class Tasks:
    """The task operations of one client slot. Methods that change its private state, or a queue's
    ring, run in its critical section: see Client in _shm.pyx."""
    cdef char *c
    cdef object keep            # owner of the mapping
    cdef readonly unsigned slot
    cdef unsigned start         # the first queue to search
    cdef uint16_t tables[TABLES]  # own tables in which results are awaited
    cdef uint8_t watched[TABLES]
    cdef int n_tables
    cdef uint32_t parked[PARKS]
    cdef uint64_t void_task     # the task that ran here was aborted: its result does not count

    def __cinit__(self, object client):
        self.keep = client
        self.c = <char *><uint64_t>client.control_address
        self.slot = client.slot

    @property
    def cores(self) -> int:
        """CPUs that this host's processes may use."""
        return root_of(self.c).cores

    # -- submitting ----------------------------------------------------------------------------

    def open_queue(self, unsigned pool, bint here=False) -> int:
        """A ring of hints from this client to the workers of a pool. `here`: only to workers of
        this host."""
        cdef unsigned q
        if pool >= POOLS:
            raise ValueError(f"pool {pool}: there are {POOLS}")
        for q in range(QUEUES):
            if queue_open(self.c, q, self.slot, pool, here):
                return q
        raise MemoryError(f"all {QUEUES} task queues of this host are taken")

    def close_queue(self, unsigned queue) -> None:
        if queue < QUEUES and LOAD32(&queue_of(self.c, queue).owner) == self.slot + 1:
            queue_close(self.c, queue)

    cdef int watch_table(self, unsigned table) except -1:
        if not self.watched[table]:
            self.watched[table] = 1
            self.tables[self.n_tables] = table
            self.n_tables += 1
        return 0

    @cython.critical_section
    def watch(self, uint64_t oid) -> None:
        """drain() reports this id: a result of this client that another process writes."""
        check(oid)
        self.watch_table(ID_TABLE(oid))

    @cython.critical_section
    def watch_only(self, list tables) -> None:
        """For the node: only these tables, its own and adopted ones."""
        self.n_tables = 0
        memset(self.watched, 0, sizeof(self.watched))
        for table in tables:
            self.watch_table(table)

    @cython.critical_section
    def submit(self, uint64_t oid, uint64_t function, bytes args, uint64_t args_oid, int retries,
               uint64_t timeout_ns, unsigned flags, bytes name, unsigned queue,
               bint ready, uint64_t output_owner=0, unsigned tries=0) -> bool:
        """Writes a WAITING header's record. ready: QUEUED at once, with a hint.

        False: no hint was posted (not ready, or the ring is full: post() it later). `tries`: how
        often the task has begun elsewhere.
        """
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        cdef Py_ssize_t n = PyBytes_GET_SIZE(args)
        if n > ARGS_INLINE:
            raise ValueError(f"{n} bytes of arguments do not fit into {ARGS_INLINE}")
        r.function = function
        r.args = args_oid
        r.args_len = <uint32_t>n
        r.retries_left = <uint16_t>min(max(retries, 0), 65535)
        r.tries = <uint16_t>tries
        r.flags, r.concurrency = <uint16_t>flags, <uint16_t>(flags >> 16)
        r.timeout_ns = timeout_ns
        r.started_ns = 0
        r.submitted_ns = now_ns()
        r.output_owner = output_owner
        memset(r.name, 0, NAME_BYTES)
        memcpy(r.name, PyBytes_AS_STRING(name), min(PyBytes_GET_SIZE(name), NAME_BYTES))
        memcpy(r.args_inline, PyBytes_AS_STRING(args), n)
        set_pool(self.c, oid, queue_of(self.c, queue).pool)
        self.watch_table(ID_TABLE(oid))
        return ready and self.queue(oid, queue)

    @cython.critical_section
    def post(self, uint64_t oid, unsigned queue) -> bool:
        """WAITING -> QUEUED, and a hint. False: the ring is full."""
        check(oid)
        return self.queue(oid, queue)

    cdef bint queue(self, uint64_t oid, unsigned queue) noexcept:
        change_state(self.c, oid, ST_WAITING, ST_QUEUED, -1, -1)
        return queue_post(self.c, queue, oid)

    def cancel(self, uint64_t oid, bint force=False) -> int:
        """1: cancelled before it ran; 2 (force): while it ran; 0: too late."""
        check(oid)
        return cancel_task(self.c, oid, force)

    def take(self, uint64_t oid) -> bool:
        """WAITING -> CLAIMED by this client: its own task fails without having run."""
        check(oid)
        return change_state(self.c, oid, ST_WAITING, ST_CLAIMED, -1, self.slot)

    def claimant(self, uint64_t oid) -> int:
        """The slot that runs, or ran, the task."""
        check(oid)
        return WORD_CLAIMANT(LOAD64(&header_of(self.c, oid).word))

    def set_taken(self, uint64_t oid) -> None:
        """The submitter now holds the refs inside the result."""
        check(oid)
        STORE64(&header_of(self.c, oid).taken, 1)

    def taken(self, uint64_t oid) -> bool:
        """Also True if no process will take it: freed, deleted, cancelled, or another
        generation."""
        check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        cdef uint64_t w = LOAD64(&h.word)
        if WORD_GENERATION(w) != ID_GENERATION(oid) or WORD_STATE(w) in (
                ST_FREED, ST_DELETED, ST_CANCELLED):
            return True
        return LOAD64(&h.taken) != 0

    @cython.critical_section
    def drain(self) -> list[int]:
        """Ids of this client that have become done since the last call."""
        cdef list found = []
        cdef uint64_t summary, bits, w
        cdef unsigned word, bit, index
        cdef int k
        cdef shm_table *t
        for k in range(self.n_tables):
            t = table_of(self.c, self.tables[k])
            if not LOAD64(&t.done_summary):
                continue
            summary = SWAP64(&t.done_summary, 0)
            while summary:
                word = ctz(summary)
                summary &= summary - 1
                bits = SWAP64(&t.done[word], 0)
                while bits:
                    bit = ctz(bits)
                    bits &= bits - 1
                    index = word * 64 + bit
                    w = LOAD64(&header_at(self.c, self.tables[k], index).word)
                    if state_done(WORD_STATE(w)):  # otherwise a bit of an earlier generation
                        found.append(ID_MAKE(self.tables[k], index, WORD_GENERATION(w)))
        return found

    # -- working -------------------------------------------------------------------------------

    def next(self, unsigned pool, uint64_t timeout_ns) -> int:
        """Waits for a hint and claims a task. 0: none came; the caller checks its state and calls
        again."""
        cdef uint64_t oid
        with nogil:
            oid = task_next(self.c, pool, self.slot, &self.start, now_ns() + timeout_ns)
        if not oid:  # a signal handler that raises must not lose a claimed task
            check_signals()
        return oid

    def take_queued(self, unsigned pool) -> int:
        """As next(), without waiting: claims a queued task. 0: none."""
        return queue_take(self.c, pool, self.slot, &self.start)

    def offer(self, unsigned pool, bint free) -> None:
        """For the node: whether to wake it for hints without an idle worker in this pool. Call
        take_queued() afterwards: earlier posts woke no one."""
        cdef uint64_t bit = 1ULL << (self.slot % 64)
        if free:
            OR64(&pool_of(self.c, pool).idle[self.slot // 64], bit)
        else:
            AND64(&pool_of(self.c, pool).idle[self.slot // 64], ~bit)

    def idle(self, unsigned pool) -> int:
        """How many workers of this host are waiting for a task of the pool."""
        return pool_idle(self.c, pool)

    def claim(self, uint64_t oid) -> bool:
        check(oid)
        return task_claim(self.c, oid, self.slot)

    def task(self, uint64_t oid) -> tuple:
        """(function id, arguments' id or 0, inline arguments, flags, timeout_ns, tries)."""
        check(oid)
        cdef shm_record *r = record_of(self.c, oid)
        return (r.function, r.args, PyBytes_FromStringAndSize(<char *>r.args_inline, r.args_len),
                r.flags | r.concurrency << 16, r.timeout_ns, r.tries)

    def set_retry_delay(self, uint64_t oid, float first_s, float factor, float max_s) -> None:
        """Sets the pauses between the tries of a task with DELAYED_FLAG, before it is sent."""
        check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        h.delay_first_s, h.delay_factor, h.delay_max_s = first_s, factor, max_s

    def retry_delay(self, uint64_t oid) -> tuple[float, float, float]:
        """(first, factor, maximum) of such a task."""
        check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        return h.delay_first_s, h.delay_factor, h.delay_max_s

    def retry_pause(self, uint64_t oid) -> float:
        """Seconds from the end of such a task's last try to its next one."""
        check(oid)
        cdef shm_header *h = header_of(self.c, oid)
        cdef double pause = h.delay_first_s
        cdef int tries
        for tries in range(1, record_of(self.c, oid).tries):
            if pause >= h.delay_max_s:
                break
            pause *= h.delay_factor
        return min(pause, h.delay_max_s)

    def output_owner(self, uint64_t oid) -> int:
        """The id of the host whose driver gets its output; 0: this host."""
        check(oid)
        return record_of(self.c, oid).output_owner

    def name(self, uint64_t oid) -> str:
        """The name that its submitter gave it; "" if it is not a task."""
        check(oid)
        if header_of(self.c, oid).kind != KIND_TASK:
            return ""
        return (<bytes>record_of(self.c, oid).name[:NAME_BYTES]).split(b"\0")[0].decode(
            errors="replace")

    def pool_of(self, uint64_t oid) -> int:
        check(oid)
        return header_of(self.c, oid).pool

    @cython.critical_section
    def begin(self, uint64_t oid) -> int:
        """Records the running task, for deadlines and reports. Returns the enclosing task."""
        if oid:
            check(oid)
        cdef shm_client *me = client_of(self.c, self.slot)
        cdef uint64_t before = me.running, timeout
        cdef shm_record *r
        set_running(self.c, self.slot, oid)
        if oid:
            r = record_of(self.c, oid)
            r.started_ns = now_ns()
            trace_push(self.c, self.slot, oid, r.name, r.started_ns)
            timeout = r.timeout_ns
            if timeout:
                STORE64(&me.deadline_id, oid)
                STORE64(&me.deadline_ns, r.started_ns + timeout)
                wake_node(self.c)
        elif me.deadline_ns:
            STORE64(&me.deadline_ns, 0)
        return before

    @cython.critical_section
    def end(self, uint64_t before, int failed) -> None:  # -1: it failed, and is retried
        cdef shm_client *me = client_of(self.c, self.slot)
        if me.deadline_ns and me.deadline_id == me.running:  # not an enclosing task's deadline
            STORE64(&me.deadline_ns, 0)
        trace_pop(self.c, self.slot, OUTCOME_CANCELLED if self.void_task == me.running
                  else OUTCOME_FAILED if failed else OUTCOME_DONE)
        set_running(self.c, self.slot, before)
        if failed > 0:
            me.tasks_failed += 1
        elif not failed:
            me.tasks_done += 1

    def aborted(self, uint64_t oid) -> bool:
        """Whether the task that this client runs was cancelled or deleted."""
        check(oid)
        cdef uint64_t w = LOAD64(&header_of(self.c, oid).word)
        return WORD_GENERATION(w) == ID_GENERATION(oid) and WORD_STATE(w) == ST_ABORTED

    def finish(self, uint64_t oid, bint failed) -> bool:
        """CLAIMED -> SEALED or FAILED, after bind(). False: it was aborted, and the result is
        void."""
        check(oid)
        if finish(self.c, oid, self.slot, ST_FAILED if failed else ST_SEALED):
            return True
        self.void_task = oid
        return False

    def settle(self, uint64_t oid) -> bool:
        """Called after finish() returned False and the block was returned."""
        check(oid)
        return settle_abort(self.c, oid, self.slot)

    @property
    def node_number(self) -> int:
        """The number of this host's node in the cluster."""
        return LOAD32(&client_of(self.c, NODE_SLOT).pool)

    def running(self, unsigned slot) -> int:
        return LOAD64(&client_of(self.c, slot).running)

    def pid(self, unsigned slot) -> int:
        return client_of(self.c, slot).pid

    def set_pid(self, unsigned slot, uint32_t pid) -> None:
        STORE32(&client_of(self.c, slot).pid, pid)

    def set_blocked(self, bint blocked) -> None:
        """The process waits inside a task: the node may start a replacement."""
        STORE32(&client_of(self.c, self.slot).blocked, blocked)
        if blocked:
            wake_declined(self.c, self.slot)
        wake_node(self.c)

    @property
    def is_blocked(self) -> bool:
        return LOAD32(&client_of(self.c, self.slot).blocked) != 0

    @property
    def retire(self) -> bool:
        return LOAD32(&client_of(self.c, self.slot).retire) & 1

    def pool_state(self, unsigned pool) -> int:
        """0 free, 1 open, 2 closing, 3 broken, 4 an ended actor's."""
        return LOAD32(&pool_of(self.c, pool).state)

    def owns_queue(self, unsigned queue, unsigned pool) -> bool:
        """Whether the queue is still this client's, and to that pool."""
        return (LOAD32(&queue_of(self.c, queue).owner) == self.slot + 1 and
                LOAD32(&queue_of(self.c, queue).pool) == pool)

    def close_queues_to(self, unsigned pool) -> None:
        """For the node: no process can submit to that pool any longer."""
        for q in range(LOAD32(&root_of(self.c).queues_high)):
            if LOAD32(&queue_of(self.c, q).owner) and LOAD32(&queue_of(self.c, q).pool) == pool:
                queue_close(self.c, q)

    def wake_pool(self, unsigned pool) -> None:
        """Wakes every worker of the pool that sleeps until there is a task."""
        cdef unsigned i
        cdef shm_client *w
        for i in range(1, CLIENTS):  # a node writes its number into its slot's `pool`
            w = client_of(self.c, i)
            if LOAD32(&w.state) and w.kind == CLIENT_WORKER and w.pool == pool:
                wake_for_task(self.c, i)

    def wake_pool_all(self) -> None:
        """Wakes all clients, whatever they wait for: the cluster is closing."""
        cdef unsigned i
        for i in range(CLIENTS):
            if LOAD32(&client_of(self.c, i).state):
                wake_for_task(self.c, i)
                wake_client(self.c, i)

    def wake_node(self) -> None:
        wake_node(self.c)

    def wake(self, unsigned slot) -> None:
        """Wakes threads of the client that wait for objects and events, not for tasks."""
        wake_client(self.c, slot)

    def wake_for_task(self, unsigned slot) -> None:
        """Wakes a worker that sleeps until there is a task."""
        wake_for_task(self.c, slot)

    def release_stand_ins(self, unsigned pool) -> None:
        """For the node: lets as many stand-ins begin tasks as regular workers of the pool wait
        inside tasks."""
        release_stand_ins(self.c, pool)

    # -- waiting -------------------------------------------------------------------------------

    def event(self) -> int:
        """Read it before checking a condition; pass it to wait_event() afterwards."""
        return LOAD32(&client_of(self.c, self.slot).event)

    def wait_event(self, uint32_t seen, uint64_t deadline_ns, bint spin, uint64_t oid=0) -> int:
        """Sleeps until the event word differs; after one time slice returns AGAIN (2). `oid`: the
        object of the wait, for `dump`."""
        cdef int n = 0, result
        if oid:
            says_waiting(client_of(self.c, self.slot), oid, 1, now_ns())
        with nogil:
            result = wait_for(self.c, self.slot, NULL, &n, -1, NULL, 0, &seen, spin,
                              deadline_ns)
        if oid:
            STORE64(&client_of(self.c, self.slot).waiting_id, 0)
        check_signals()
        if result == WAIT_AGAIN and not self.keep.usable:
            result = WAIT_CLOSING
        return result

    def wait(self, list oids, int need, uint64_t deadline_ns, bint news) -> int:
        """Waits until `need` of the ids are done: DONE, TIMEOUT, CLOSING; with news also NEWS (then
        drain).

        The time is monotonic_ns; 0 polls.
        """
        cdef int n = len(oids), result = WAIT_AGAIN, i, total = n
        cdef uint64_t *ids = <uint64_t *>malloc(8 * n + 8)
        cdef list buckets = []
        if ids == NULL:
            raise MemoryError()
        try:
            for i in range(n):
                ids[i] = oids[i]
                check(ids[i])
            if deadline_ns:
                buckets = self.park(oids)
            while result == WAIT_AGAIN:
                with nogil:
                    result = wait_for(self.c, self.slot, ids, &n, total - need, self.tables,
                                      self.n_tables if news else 0, NULL, 1, deadline_ns)
                check_signals()
                if result == WAIT_AGAIN and not self.keep.usable:
                    result = WAIT_CLOSING
        finally:
            STORE64(&client_of(self.c, self.slot).waiting_id, 0)
            self.unpark(buckets)
            free(ids)
        return result

    @cython.critical_section
    def park(self, list oids) -> list[int]:
        """Registers this client to be woken when objects of other clients are done. Pass the result
        to unpark()."""
        cdef list buckets = []
        cdef uint64_t oid
        cdef unsigned b
        for oid in oids:
            check(oid)
            if LOAD32(&table_of(self.c, ID_TABLE(oid)).owner) == self.slot + 1:
                continue  # the owner is always woken
            b = park_index(oid)
            buckets.append(b)
            self.parked[b] += 1
            if self.parked[b] == 1:
                OR64(&park_of(self.c, b)[self.slot // 64], 1ULL << (self.slot % 64))
        return buckets

    @cython.critical_section
    def unpark(self, list buckets) -> None:
        cdef unsigned b
        for b in buckets:
            self.parked[b] -= 1
            if self.parked[b] == 0:
                AND64(&park_of(self.c, b)[self.slot // 64], ~(1ULL << (self.slot % 64)))

    def bucket(self, uint64_t oid) -> int:
        """The bucket in which park() has put it, if it is another owner's."""
        return park_index(oid)

    def take_parked_news(self) -> list[int]:
        """Buckets of this client in which an object has become done since the last call."""
        cdef list found = []
        cdef uint64_t *news = client_of(self.c, self.slot).parked_news
        cdef uint64_t bits
        cdef unsigned i
        for i in range(PARKS // 64):
            bits = SWAP64(&news[i], 0) if LOAD64(&news[i]) else 0
            while bits:
                found.append(64 * i + ctz(bits))
                bits &= bits - 1
        return found

    cdef bint is_done(self, uint64_t oid) except -1:
        check(oid)
        cdef uint64_t w = LOAD64(&header_of(self.c, oid).word)
        return (WORD_GENERATION(w) != ID_GENERATION(oid) or state_done(WORD_STATE(w))
                or WORD_STATE(w) == ST_FREED)

    def done(self, uint64_t oid) -> bool:
        return self.is_done(oid)

    def ids_of(self, list items, type future, object submitter, type ref, uint64_t host_id) -> list:
        """The local ids of many Futures and refs; 0 for each that is neither a Future of this
        submitter nor the ref of an object of this host. The types are arguments, because this
        module imports none."""
        cdef list found = []
        cdef uint64_t words[2]  # of an object's public id: the host, the local id
        cdef bytes public
        for item in items:
            if type(item) is future and item._submitter is submitter:
                found.append(item._oid)
                continue
            words[0] = words[1] = 0
            if type(item) is ref:
                public = item._id
                if PyBytes_GET_SIZE(public) == sizeof(words):
                    memcpy(words, PyBytes_AS_STRING(public), sizeof(words))
            found.append(words[1] if words[0] == host_id else 0)
        return found

    def sort_out(self, list items, list oids, Py_ssize_t most) -> tuple[list, list]:
        """Returns (the first `most` items that are done, the rest), in order. oids[i] is the id of
        items[i]."""
        cdef list done = [], left = []
        cdef Py_ssize_t i, count = 0
        for i in range(min(len(items), len(oids))):
            if count < most and self.is_done(oids[i]):
                done.append(items[i])
                count += 1
            else:
                left.append(items[i])
        return done, left

    # -- looking -------------------------------------------------------------------------------

    @property
    def tracing(self) -> bool:
        """Whether to record what this client does."""
        return tracing(self.c)

    def note_group_call(self, bytes name, uint64_t call, uint32_t rank, uint64_t begin_ns,
                         bint failed, uint64_t nbytes) -> None:
        """Records the end of a Group's call, if a trace is running. nbytes: the member's input."""
        cdef shm_event event
        if not tracing(self.c) or not begin_ns:
            return
        memset(&event, 0, sizeof(event))
        event.id, event.begin_ns, event.end_ns, event.rank = call, begin_ns, now_ns(), rank
        event.kind = EVENT_GROUP_CALL
        event.bytes_in = nbytes
        event.outcome = OUTCOME_FAILED if failed else OUTCOME_DONE
        memcpy(event.name, PyBytes_AS_STRING(name), min(PyBytes_GET_SIZE(name), NAME_BYTES))
        trace_add(self.c, self.slot, &event)

    def unfinished(self, unsigned state, Py_ssize_t most) -> tuple[list[int], int]:
        """Tasks in that state, at most `most`, and their total number."""
        cdef list found = []
        cdef Py_ssize_t count = 0
        cdef unsigned t, i
        cdef uint64_t w
        for t in range(LOAD32(&root_of(self.c).tables_high)):
            for i in range(LOAD32(&table_of(self.c, t).high)):
                w = LOAD64(&header_at(self.c, t, i).word)
                if WORD_STATE(w) == state and header_at(self.c, t, i).kind == KIND_TASK:
                    count += 1
                    if count <= most:
                        found.append(ID_MAKE(t, i, WORD_GENERATION(w)))
        return found, count

    def submitted_ns(self, uint64_t oid) -> int:
        """When its submitter sent it; 0: not yet."""
        check(oid)
        return record_of(self.c, oid).submitted_ns

    def lose(self) -> None:
        """The node is gone: every wait of this process ends with CLOSING."""
        STORE32(&private_of(self.c).lost, 1)
        wake_client(self.c, self.slot)


include "tasks_boards.pxi"
include "tasks_trace.pxi"
include "tasks_concurrent.pxi"
include "tasks_ranked.pxi"
