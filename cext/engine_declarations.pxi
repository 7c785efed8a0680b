# The parts of engine_state.h that _engine.pyx calls; the header documents them.

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil,
                       void (*)() noexcept nogil)


cdef extern from "engine_state.h" nogil:
    enum:
        BLOCK_BYTES_MIN
        FRAME_BYTES
        FRAME_BLOCK_BYTES_MAX
        FRAME_COLL_BYTES_MAX
        LINK_PULLS_MAX
        EVENT_FILLED
        EVENT_PULL_FAILED
        EVENT_FOLD_FAILED
        EVENT_CLOSED
        EVENT_LINK_LOST
        EVENT_COLL_TAKEN
        EVENT_COLL_PART
        EVENT_COLL_FIRST
        EVENT_COLL_SEND
        EVENT_COLL_MOVED
        COMMAND_CELL
        COMMAND_ADVANCE
        COMMAND_PULL
        COMMAND_FOLD
        COMMAND_CLOSE
        COMMAND_CONNECT
        COMMAND_DISCONNECT
        COMMAND_FREE
        COMMAND_RECEIVED
        COMMAND_SENT
        PLACE_HEADER
        PLACE_CELL
        PLACE_COLL
        SCRATCH_BYTES
        REASON_BYTES
        REDUCE_OP_COUNT
        REDUCE_DTYPE_COUNT

    const char *reduce_op_names[]
    const char *reduce_dtype_names[]

    struct frame_key:
        uint64_t operation
        uint32_t epoch, stripe, part

    ctypedef uint64_t atomic "_Atomic uint64_t"

    struct frame_t "frame":
        uint32_t length
        uint64_t offset

    struct event_t "event"

    struct engine_t "engine":
        int event_fd
        bint threaded, signalled
        event_t *events

    struct cell_t "cell":
        char *bytes
        uint64_t number, nbytes
        atomic watermark

    struct batch_t "batch":
        uint64_t generation, call
        uint32_t plan
        size_t count
        cell_t **cells

    struct link_t "link":
        atomic bytes_sent, bytes_received, backlogged_bytes, backlogged_ns

    struct fold_t "fold":
        pass

    struct event_t "event":
        event_t *next
        int kind
        uint64_t number, peer, call, version
        uint32_t phase, plan
        size_t nbytes
        char *bytes
        char *reason

    ctypedef unsigned char flag "bool"

    uint64_t atomic_load_explicit(atomic *word, int order)
    int memory_order_acquire
    uint32_t crc32c_c "crc32c" (uint32_t crc, const void *data, size_t nbytes)
    uint32_t crc32c_by_instruction(uint32_t crc, const void *data, size_t nbytes)
    uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t nbytes)
    engine_t *engine_new(uint64_t incarnation, uint32_t block_bytes_max,
                         uint32_t waiting_requests_max, bint threaded)
    void engine_post(engine_t *engine, int kind, cell_t *cell, link_t *link, fold_t *fold,
                     const frame_key *key, uint64_t amount)
    void engine_hold(engine_t *engine, bint hold)
    void engine_post_batch(engine_t *engine, batch_t *batch)
    event_t *engine_take(engine_t *engine)
    bint engine_step(engine_t *engine)
    void engine_stop(engine_t *engine)
    void cell_free(cell_t *cell)
    cell_t *cell_new(const engine_t *engine, uint64_t number, void *bytes, uint64_t nbytes,
                     uint64_t watermark, const frame_key *key)
    link_t *link_new(uint64_t number, uint64_t peer, uint64_t peer_incarnation,
                     bint driven, bint checksum)
    void link_free(link_t *link)
    const char *socket_take(link_t *link, int fd)
    int fold_accumulator(int op, int dtype)
    size_t fold_item_bytes(int op, int dtype, bint accumulated, bint is_result)
    fold_t *fold_new(cell_t *cell, int op, int dtype, size_t divisor, bint final,
                     cell_t **sources, const flag *accumulated, size_t count)
    void driven_enter(engine_t *engine)
    int driven_wait_frame(engine_t *engine, link_t *link, double timeout_s, frame_t *frame,
                          uint64_t *cell_number, char **small, char *reason)
    int driven_wait_place(engine_t *engine, link_t *link, double timeout_s, int *kind,
                          uint32_t *nbytes, uint64_t *cell_number, uint64_t *offset, char *reason)
    void driven_header(link_t *link, const char *header)
    void driven_coll(link_t *link, const char *bytes, size_t nbytes)
    void event_free(event_t *event)
    void *engine_memory(size_t nbytes)


cdef extern from "engine_coll_ports.h" nogil:
    enum:
        BOARDS
        MEMBERS
        COLL_NOBODY
        COLL_ASK_ADD
        COLL_ASK_OPEN
        COLL_ASK_CLOSE
        COLL_ASK_YIELD
        COLL_ASK_FORGET
        COLL_ASK_BEGIN
        COLL_ASK_VOTE
        COLL_ASK_RESULT
        COLL_ASK_FRAME
        COLL_ASK_BELL
        COLL_ASK_LOOK

    ctypedef struct coll_request:
        int kind, fd
        uint64_t generation, version, call, result
        uint32_t size, node, board, nbytes, plan
        unsigned char phase
        bint awaited
        char *control
        char *bytes
        uint32_t *node_of

    void engine_post_coll(engine_t *engine, coll_request *asked)
    void coll_play_c "coll_play" (void *play)
