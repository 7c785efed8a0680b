# Cython declarations of the C headers, included by the modules that touch shared memory.
cdef extern from "shm_spans.h" nogil:
    ctypedef struct shm_root:
        uint64_t magic, host_id, store_bytes, small_object_bytes_max, span_bytes, returns_next
        uint32_t version, closing, tables_high, queues_high, hungry, tracing, cores, spin_us_max
        uint64_t returns[4096]
        uint64_t spinners[4]
        uint64_t gone_tables[16]
        uint32_t file_writer, resources, removed, printed
    ctypedef struct shm_header:
        uint64_t word, block, size, taken, spill
        uint64_t refs[4]
        uint64_t pins[4]
        uint32_t stamp
        uint8_t kind, flags
        uint16_t pool
        float delay_first_s, delay_factor, delay_max_s
    ctypedef struct shm_record:
        uint64_t function, args, timeout_ns, started_ns, submitted_ns, output_owner
        int32_t priority, floor
        uint32_t args_len, result_len
        uint16_t retries_left, tries, flags, concurrency
        char name[32]
        uint8_t args_inline[224]
        uint8_t result_inline[192]
    ctypedef struct shm_table:
        uint32_t owner, high
        uint64_t owner_generation, pools, done_summary, freed_summary, gone_summary
        uint64_t done[64]
        uint64_t freed[64]
        uint64_t gone[64]
        uint64_t used[64]
        uint64_t open[64]
        uint64_t pool_groups[64]
    ctypedef struct shm_client:
        uint32_t state, pid, pool, kind, event, sleeping, returned, blocked, stands_in, task, retire
        uint64_t generation, running, deadline_ns, deadline_id, tasks_done, tasks_failed, puts, put_bytes
        uint64_t parked_news[4]
        uint64_t waiting_id, waiting_n, waiting_ns, waiting_last
    ctypedef struct shm_queue:
        uint32_t owner, pool, here, bag
        uint64_t head, tail
        uint64_t ring[4096]
    ctypedef struct shm_pool:
        uint32_t state, stand_ins
        uint64_t idle[4]
        uint64_t spinning[4]
    ctypedef struct shm_member:
        uint64_t seq, start, contribution, client, news, lent, taken
    ctypedef struct shm_board:
        uint32_t used, size, formed, epoch
        uint64_t generation, alive, joining, result_id, result_call
        shm_member members[64]
    ctypedef struct shm_form:
        uint8_t kind, op, dtype, ndim
        uint16_t root, buffered
        uint64_t nbytes
        uint64_t shape[6]
    ctypedef struct shm_part:
        uint64_t changes, mask
        uint64_t buffers[2]
        shm_form form
        uint8_t data[32768]
    ctypedef struct shm_event:
        uint64_t id, begin_ns, end_ns
        uint8_t kind, outcome
        uint16_t depth
        uint32_t rank
        char name[32]
        uint64_t bytes_in, bytes_out
    ctypedef struct shm_trace:
        uint64_t tail, head
        uint32_t changes, depth
    ctypedef struct shm_block:
        uint64_t owner, bytes, generation
        uint32_t lessee, big
    ctypedef struct shm_private:
        uint32_t lost
    ctypedef struct span:
        uint64_t base
    ctypedef struct span_heap:
        span *spans
        uint32_t count
    enum:
        CLIENTS
        MASK_WORDS
        POOLS
        PARKS
        BOARDS
        MEMBERS
        PART_BYTES_MAX
        PART_DIMS_MAX
        QUEUES
        RING
        RETURNS
        NAME_BYTES
        ARGS_INLINE
        RESULT_INLINE
        BLOCK_ALIGN
        NODE_SLOT
        SHM_VERSION
        PRIVATE_BYTES
        ST_FREE
        ST_WAITING
        ST_QUEUED
        ST_CLAIMED
        ST_ABORTED
        ST_SEALED
        ST_FAILED
        ST_CANCELLED
        ST_DELETED
        ST_SPILLING
        ST_SPILLED
        ST_FREED
        RECORD_DELAYED
        CLIENT_DRIVER
        CLIENT_WORKER
        STANDS_NOT
        STANDS_ASIDE
        KIND_PUT
        KIND_TASK
        KIND_OPERATION
        KIND_LENT
        EVENT_TASK
        EVENT_GROUP_CALL
        OUTCOME_DONE
        OUTCOME_FAILED
        OUTCOME_CANCELLED
        TRACE_OPEN
        TRACE_RING
        FLAG_INLINE
        FLAG_REFS
        FLAG_ABORT_DELETE
        FLAG_RETURNED
        FLAG_ELSEWHERE
        TABLES
        TABLE_HEADERS
        TABLE_WORDS
        UNITS_MAX
    uint64_t SHM_MAGIC, CONTROL_BYTES, ROOT_BYTES, WORD_ACQUIRES_MASK, BLOCK_LEASED
    uint32_t GENERATION_MASK
    unsigned WORD_STATE(uint64_t)
    unsigned WORD_CLAIMANT(uint64_t)
    unsigned WORD_ATTEMPT(uint64_t)
    uint32_t WORD_GENERATION(uint64_t)
    uint64_t WORD_MAKE(uint64_t, uint64_t, uint64_t, uint64_t)
    unsigned ID_TABLE(uint64_t)
    unsigned ID_INDEX(uint64_t)
    uint32_t ID_GENERATION(uint64_t)
    uint64_t ID_MAKE(uint64_t, uint64_t, uint64_t)
    uint64_t WORD_ACQUIRE_ONE
    shm_root *root_of(char *)
    shm_client *client_of(char *, unsigned)
    shm_pool *pool_of(char *, unsigned)
    uint64_t *park_of(char *, unsigned)
    shm_board *board_of(char *, unsigned)
    shm_part *part_of(char *, unsigned, unsigned)
    shm_queue *queue_of(char *, unsigned)
    shm_table *table_of(char *, unsigned)
    shm_header *header_at(char *, unsigned, unsigned)
    shm_header *header_of(char *, uint64_t)
    shm_record *record_of(char *, uint64_t)
    shm_record *record_at(char *, unsigned, unsigned)
    shm_trace *trace_of(char *, unsigned)
    shm_block *block_of(char *, uint64_t)
    shm_private *private_of(char *)
    void set_node_event(char *, int)
    int id_valid(uint64_t)
    uint32_t LOAD32 "LOAD"(uint32_t *)
    uint64_t LOAD64 "LOAD"(uint64_t *)
    void STORE32 "STORE"(uint32_t *, uint32_t)
    void STORE64 "STORE"(uint64_t *, uint64_t)
    uint32_t ADD32 "ADD"(uint32_t *, uint32_t)
    uint64_t ADD64 "ADD"(uint64_t *, uint64_t)
    uint8_t OR8 "OR"(uint8_t *, uint8_t)
    uint8_t AND8 "AND"(uint8_t *, uint8_t)
    void note_pool(shm_table *, unsigned, unsigned)
    void forget_pools(shm_table *, unsigned)
    void set_pool(char *, uint64_t, unsigned)
    uint64_t OR64 "OR"(uint64_t *, uint64_t)
    uint64_t AND64 "AND"(uint64_t *, uint64_t)
    uint64_t SWAP64 "SWAP"(uint64_t *, uint64_t)
    uint32_t SWAP32 "SWAP"(uint32_t *, uint32_t)
    int CAS32(uint32_t *, uint32_t, uint32_t)
    int CAS64(uint64_t *, uint64_t, uint64_t)
    unsigned ctz "__builtin_ctzll"(uint64_t)
    unsigned popcount "__builtin_popcountll"(uint64_t)
    void set_gone_bit(char *, uint64_t)
    uint64_t now_ns()
    uint32_t now_stamp()
    void wake_client(char *, unsigned)
    void futex_wake(uint32_t *)
    unsigned park_index(uint64_t)
    void wake_node(char *)
    int state_done(unsigned)
    int mask_empty(uint64_t *)
    int try_free(char *, uint64_t)
    unsigned acquire_bit(char *, uint64_t, unsigned, int, uint64_t *)
    void release_bit(char *, uint64_t, unsigned, int)
    int change_state(char *, uint64_t, unsigned, unsigned, int, int)
    void announce_done(char *, uint64_t)
    void wake_waiters(char *, uint64_t)
    int finish(char *, uint64_t, unsigned, unsigned)
    int settle_abort(char *, uint64_t, unsigned)
    int delete_object(char *, uint64_t)
    int take_back(char *, char *, uint64_t, unsigned)
    int cancel_task(char *, uint64_t, int)
    int return_block(char *, char *, uint64_t, uint64_t)
    void heap_init(span_heap *, uint64_t, uint64_t, uint64_t *)
    uint64_t *spans_of(char *)
    uint64_t SPANS, SPAN_FIXED
    uint64_t SPAN_NEXT(uint64_t, uint64_t)
    int span_revoke(uint64_t *, char *, uint64_t, uint64_t)
    void heap_clear(span_heap *)
    int heap_add(span_heap *, uint64_t)
    int heap_find(span_heap *, uint64_t)
    uint64_t RETURN_LAP(uint64_t)
    void heap_free(span_heap *, uint64_t)
    void heap_reclaim(span_heap *, char *)
    uint64_t heap_allocate(span_heap *, char *, char *, unsigned, uint64_t)
    int heap_remove_empty(span_heap *, uint64_t *, int)
cdef extern from "shm_trace.h" nogil:
    enum:
        TRACE_WAKE
    int tracing(char *)
    void trace_push(char *, unsigned, uint64_t, const char *, uint64_t)
    void trace_pop(char *, unsigned, unsigned)
    void trace_add(char *, unsigned, const shm_event *)
    unsigned trace_copy_open(char *, unsigned, shm_event *)
    unsigned trace_take(char *, unsigned, shm_event *, uint64_t *)
    void trace_clear(char *, unsigned)
cdef extern from "shm_sweep.h" nogil:
    void sweep_bits(char *, unsigned, int)
    void sweep_ownership(char *, unsigned)
    uint64_t live_block(char *, char *, unsigned, unsigned, uint64_t *)


include "shm_play.pxi"
cdef extern from "unistd.h" nogil:
    int ftruncate(int, long)
    int _SC_PAGESIZE
    long sysconf(int)
