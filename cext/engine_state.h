/* The engine's data: cells, links, pulls, serves, folds, and which thread may touch them.
 *
 * Bulk bytes move between hosts, and are summed on the way, without the GIL and without a Python
 * call for each block. One rule moves everything: a block moves when the watermarks of its inputs
 * have passed it.
 *
 *     cell    bytes [0, watermark) are valid and final; filled from the start, by a pull or a fold
 *     link    a connected, authenticated stream socket; both sides may pull over it
 *     pull    fills a cell of ours over a link          (the peer has a serve for it)
 *     serve   a peer's request for some or all of a cell's bytes, sent as they arrive
 *     fold    fills a cell with the element-wise reduction of other cells
 *     spot    the entry of a key: its cell, and the requests that wait for it
 *
 * Who may touch what. Everything below belongs to the engine's one thread. Other threads reach it
 * only by commands, which they post under `lock` and which are executed in order. They read only a
 * cell's watermark and a link's counters (atomics), and take events under `lock`. The lock is never
 * held while bytes move. The poster of its first command makes a cell or link. The taker of its
 * CLOSED event frees a cell; the command FREE, which is posted after its end was noticed, frees a
 * link.
 *
 * A failed allocation of these small structures ends the process with a message. Blocks are never
 * allocated by a length that a peer has sent.
 *
 */
#ifndef ENGINE_STATE_H
#define ENGINE_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "engine_frames.h"
#include "reduce_kernels.h"

enum {
    /* Cells are cut into about 8 blocks, so that hosts in a row work concurrently, but not below
     * this size: a frame costs some 5 us however short it is. */
    BLOCK_BYTES_MIN = 16 * 1024,
    BLOCKS_WANTED = 8,
    /* Bytes that a fold writes between two polls of the sockets: some 100 us. */
    FOLD_BYTES_MAX = 256 * 1024,
    /* Concurrent pulls over one link, which is also the limit of a peer's requests here. A pull's
     * number is its place below this and, in the upper half, a count that distinguishes users. */
    LINK_PULLS_MAX = 1 << 16,
    /* Receives bytes that are no longer needed. */
    SCRATCH_BYTES = 64 * 1024,
    /* Unsent bytes in the kernel above which the socket counts as full: another stream's block
     * cannot overtake them. Lower: the sender is woken too often. */
    UNSENT_BYTES_MAX = 256 * 1024,
    /* A socket's send buffer holds what its link carries in this time plus a round trip. Bytes in a
     * queue on the way delay every other stream from this host, and streams that meet at a receiver
     * share its link evenly only while queues are short. Lower: a late sender leaves the link idle.
     * The kernel's own tuning would fill any queue. */
    AHEAD_NS = 250000,
    AHEAD_BYTES_MIN = 64 * 1024,
    AHEAD_BYTES_MAX = 4 * 1024 * 1024,
    /* The rate is averaged over this much backlogged time. */
    AHEAD_LOOK_NS = 4000000,
    /* During a block, the thread is woken for each such number of further bytes. Higher: fewer
     * wake-ups, some 10 us each, but the last bytes take longer to copy. */
    WAKE_BYTES_MAX = 128 * 1024,
    /* Contributions precede results of folds, because every result waits for the last of its
     * contributions: a late pair of hosts then delays no one, as long as results of earlier blocks
     * are left to send. But one block of a result follows this many others, so that an endless
     * stream of contributions cannot block results forever. */
    BEFORE_FOLDED_MAX = 16,
    /* Bytes that are read along with an unexpected header, and copied once more: enough for a small
     * call of 1 KiB, and little of a block. */
    AHEAD_READ_BYTES = 4 * 1024,
    /* For this time, and up to a millisecond more, Python is not woken by events for which no one
     * waits, because members of a Group need the processors then. Higher: memory of ended calls is
     * freed later. */
    QUIET_NS = 4000000,
    REASON_BYTES = 96,
};

/* ---- Chains: doubly linked, the head is an element of the ring ------------------------------- */
struct chain {
    struct chain *next, *before;
};

#define FROM(pointer, type, member) ((type *)((char *)(pointer) - offsetof(type, member)))

static inline void chain_init(struct chain *chain) { chain->next = chain->before = chain; }
static inline bool chain_empty(const struct chain *chain) { return chain->next == chain; }
static inline void chain_append(struct chain *head, struct chain *element) {
    element->before = head->before;
    element->next = head;
    head->before->next = element;
    head->before = element;
}
/* The element is then its own ring: removing it again has no effect. */
static inline void chain_remove(struct chain *element) {
    element->before->next = element->next;
    element->next->before = element->before;
    chain_init(element);
}

/* ---- Cells ---------------------------------------------------------------------------------- */
struct engine;
struct link;
struct fold;

struct cell {
    uint64_t number;
    char *bytes;
    uint64_t nbytes, block_bytes;
    _Atomic uint64_t watermark;
    struct frame_key key;
    bool has_key, told, closing;
    bool folded;         /* a fold fills it, or has begun to */
    uint32_t holds;      /* threads that drive a link and are using its memory */
    uint64_t *checksums; /* of its blocks; 0: unknown. NULL: none */
    struct spot *spot;   /* if it has a key */
    struct batch *batch; /* NULL: it is reported alone when it is full */
    struct pull *pull;   /* what fills it now; never both */
    struct fold *fold;
    struct chain serves; /* struct serve.in_source */
    struct chain feeds;  /* struct fold_source.in_cell */
};

struct spot {
    struct spot *next; /* of the same bucket */
    struct frame_key key;
    struct cell *cell;    /* NULL: not made yet */
    struct chain waiting; /* struct serve.in_source */
};

/* Cells that are reported together: their waiter is woken once. With a `plan` (not 0), this node
 * votes for that call of the Group `generation` when the last cell is full. */
struct batch {
    uint64_t generation, call;
    uint32_t plan;
    size_t unfilled, count;
    struct cell *cells[];
};

/* ---- Pulls and serves ------------------------------------------------------------------------ */
struct pull {
    struct link *link;
    struct cell *cell; /* NULL: cancelled; further bytes are discarded */
    struct frame_key key;
    uint32_t number;
    uint64_t next, end;
};

struct serve {
    struct link *link;
    struct cell *cell; /* one of these two: the served cell, or the key for which it waits */
    struct spot *spot;
    struct chain in_source; /* of cell->serves or spot->waiting */
    struct chain in_ready;  /* of link->ready or link->ready_folded */
    uint32_t number;
    uint64_t next, end;
};

/* REQUEST, REFUSED, CANCEL and SMALL are queued here until they are sent, before any block. */
struct notice {
    struct chain in_notices;
    struct frame frame;
    char *block; /* of SMALL: the bytes after the header */
};

/* Where the next bytes go, for threads that drive a link. */
enum place_kind { PLACE_HEADER, PLACE_CELL, PLACE_SCRATCH, PLACE_COLL };

/* ---- Links ---------------------------------------------------------------------------------- */
struct link {
    uint64_t number, peer, peer_incarnation; /* incarnation 0: that of the first frame */
    int fd;                                  /* -1: Python threads drive it, or it is lost */
    bool driven, checksum, lost, readable, writable, deaf;
    bool ending;         /* the peer sends no more, or the socket has failed */
    uint32_t wake_bytes; /* the socket's SO_RCVLOWAT; 0: the default */
    struct chain in_links, in_active;

    /* Incoming: a header, then its block. */
    struct frame in;
    uint32_t in_header_bytes, in_block_bytes; /* how much of each has arrived */
    bool in_block;
    struct pull *in_pull;
    uint32_t in_crc;
    char *in_coll; /* the parts of a SMALL frame */

    /* Outgoing: one frame at a time. */
    struct frame out;
    bool out_full;
    uint32_t out_sent; /* of the header and the block together */
    const char *out_block;
    struct cell *out_cell; /* the owner of that memory; NULL: out_copy, or no block */
    char *out_copy;        /* the rest of the block of a closed cell */
    struct chain notices, ready, ready_folded;
    uint32_t before_folded; /* blocks sent while one of ready_folded waited */

    struct pull **pulls; /* by place */
    struct serve **serves;
    uint32_t pulls_length, serves_length, pull_count, pull_next, pulls_made;
    uint32_t waiting_count, refusal_count;

    /* Read by others. `backlogged`: from a full socket until nothing is left to send. */
    _Atomic uint64_t bytes_sent, bytes_received, backlogged_bytes, backlogged_ns;
    uint64_t backlogged_since_ns;
    uint64_t looked_bytes, looked_ns; /* of the two above, when `ahead_bytes` was last set */
    int ahead_bytes;                  /* of the socket's send buffer */

    /* Only if Python threads drive it; under engine->lock, like its `lost`. */
    pthread_cond_t changed;
    bool frame_given, place_given; /* and not yet taken */
    bool frame_out, place_out;     /* given and not yet returned: for the engine's thread only */
    struct cell *frame_cell, *place_cell; /* the cells whose memory the threads are using */
    uint32_t place_bytes;
    uint64_t place_offset; /* in that cell */
    enum place_kind place_kind;
    char reason[REASON_BYTES];
};

/* ---- Folds ---------------------------------------------------------------------------------- */
struct fold_source {
    struct chain in_cell;
    struct fold *fold;
    struct cell *cell;
    bool accumulated;
    uint32_t item_bytes;
};

struct fold {
    struct chain in_ready;
    struct cell *cell;
    const struct reduce_kernel *kernel;
    reduce_pair_fn *fold_accumulated;
    size_t divisor; /* 0: none */
    bool final;     /* narrow the result; otherwise it keeps the accumulator's dtype */
    uint32_t item_bytes;
    size_t source_count;
    struct fold_source sources[];
};

/* ---- Events and commands --------------------------------------------------------------------- */
enum engine_event_kind {
    EVENT_FILLED = 1,  /* cell; for a batch at once, when its last cell is full */
    EVENT_PULL_FAILED, /* cell, reason */
    EVENT_FOLD_FAILED, /* cell, reason */
    EVENT_CLOSED,      /* cell */
    EVENT_LINK_LOST,   /* link, peer, reason */
    /* For small calls; number: the Group's generation. */
    EVENT_COLL_TAKEN, /* call, version, bytes: Python owns its calls */
    EVENT_COLL_PART,  /* call, version, bytes: a member here has made that call */
    EVENT_COLL_FIRST, /* call: committed, as the first small one since the Group was opened, or since
                        * a call that was committed by votes */
    EVENT_COLL_SEND,  /* peer, call, version, phase, plan, bytes: a frame without a link */
    EVENT_COLL_MOVED, /* call: committed by votes */
};

struct event {
    struct event *next;
    int kind;
    uint64_t number, peer;
    uint64_t call, version;
    uint32_t phase, plan;
    size_t nbytes;
    char *bytes;
    char reason[REASON_BYTES];
};
void event_free(struct event *event);

enum command_kind {
    COMMAND_CELL,
    COMMAND_ADVANCE, /* cell, amount: the new watermark */
    COMMAND_PULL,    /* cell, link, key */
    COMMAND_FOLD,    /* fold */
    COMMAND_CLOSE,   /* cell */
    COMMAND_BATCH,   /* batch */
    COMMAND_CONNECT, /* link */
    COMMAND_DISCONNECT,
    COMMAND_FREE,
    COMMAND_RECEIVED, /* link, amount */
    COMMAND_SENT,     /* link */
    COMMAND_STOP,
    COMMAND_COLL,    /* small */
};

struct command {
    struct command *next;
    int kind;
    struct cell *cell;
    struct link *link;
    struct fold *fold;
    struct batch *batch;
    struct frame_key key;
    uint64_t amount;
    struct coll_request *small;
};

struct engine {
    uint64_t incarnation;
    uint32_t block_bytes_max, waiting_requests_max;
    int epoll_fd, command_fd, event_fd;
    pthread_t thread;
    bool stopping;
    bool threaded; /* otherwise engine_step() is its loop, without a thread or descriptors */

    pthread_mutex_t lock; /* for the next nine, and the fields of links that name it */
    pthread_cond_t undriven; /* no thread waits for a link, or is about to */
    uint32_t drivers;
    uint32_t held; /* by engine_hold(): commands about cells do not wake the thread */
    bool woken;    /* the thread was woken for commands, and has not taken them yet */
    bool signalled; /* the reader of events has been woken */
    struct command *commands, *last_command;
    struct event *events, *last_event;

    uint64_t quiet_until_ns; /* when to report quiet events; 0: there are none */
    struct chain links;      /* all links that are not freed */
    struct chain active; /* links with something to receive or to send */
    struct chain folds;  /* folds that can continue */
    struct spot **buckets;
    size_t bucket_count, spot_count;
    struct coll_world *small; /* NULL before the first Group */
    char scratch[SCRATCH_BYTES];
};

/* ---- Functions -------------------------------------------------------------------------------- */
/* engine_loop.c: the thread, and the functions for others. */
struct engine *engine_new(uint64_t incarnation, uint32_t block_bytes_max,
                          uint32_t waiting_requests_max, bool threaded); /* NULL: errno */
void engine_post(struct engine *engine, int kind, struct cell *cell, struct link *link,
                 struct fold *fold, const struct frame_key *key, uint64_t amount);
struct event *engine_take(struct engine *engine); /* a list, to be freed one by one */
/* Begins (true) and ends a period in which commands about cells are collected. They are executed
 * soon after its end, or earlier. Periods may be nested. */
void engine_hold(struct engine *engine, bool hold);
void engine_post_batch(struct engine *engine, struct batch *batch); /* takes it over */
bool engine_step(struct engine *engine); /* without a thread: whether there is more to do */
void engine_stop(struct engine *engine); /* joins the thread, frees all but cells */
void engine_tell(struct engine *engine, int kind, uint64_t number, uint64_t peer,
                 const char *reason);
void engine_tell_filled(struct engine *engine, uint64_t number, bool quiet);
void engine_tell_coll(struct engine *engine, int kind, uint64_t generation, uint64_t peer,
                       uint64_t call, uint64_t version, uint8_t phase, uint32_t plan, char *bytes,
                       size_t nbytes, bool quiet);
void *engine_memory(size_t bytes); /* zeroed; ends the process on failure */

/* engine_cells.c */
struct cell *cell_new(const struct engine *engine, uint64_t number, void *bytes, uint64_t nbytes,
                      uint64_t watermark, const struct frame_key *key);
void cell_free(struct cell *cell);
uint64_t cell_goal(const struct cell *cell, uint64_t from);
uint32_t cell_checksum(struct cell *cell, uint64_t from, uint32_t length);
void cell_keep_checksum(struct cell *cell, uint64_t from, uint32_t length, uint32_t checksum);
void cell_open(struct engine *engine, struct cell *cell);
void cell_raise(struct engine *engine, struct cell *cell, uint64_t watermark);
void cell_advance(struct engine *engine, struct cell *cell, uint64_t watermark);
void cell_tell_filled(struct engine *engine, struct cell *cell);
void cell_close(struct engine *engine, struct cell *cell);
void batch_begin(struct engine *engine, struct batch *batch);
void cell_let_go(struct engine *engine, struct cell *cell);
struct spot *spot_at(struct engine *engine, const struct frame_key *key);
void spot_drop_if_unused(struct engine *engine, struct spot *spot);

/* engine_streams.c: pulls and serves. */
void pull_begin(struct engine *engine, struct cell *cell, struct link *link,
                const struct frame_key *key);
void pull_cancel(struct engine *engine, struct pull *pull);
void pull_end(struct pull *pull);
struct pull *pull_of(const struct link *link, uint32_t number);
const char *serve_request(struct engine *engine, struct link *link, const struct frame *frame);
void serve_attach(struct engine *engine, struct serve *serve, struct cell *cell);
uint64_t serve_goal(const struct serve *serve);
void serve_look(struct engine *engine, struct serve *serve);
void serve_refuse(struct engine *engine, struct serve *serve, int reason);
void serve_cancel(struct engine *engine, struct link *link, uint32_t number);
void serve_end(struct engine *engine, struct serve *serve);

/* engine_links.c: frames in and out, over sockets or driven. */
struct link *link_new(uint64_t number, uint64_t peer, uint64_t peer_incarnation,
                      bool driven, bool checksum);
void link_open(struct engine *engine, struct link *link);
void link_lose(struct engine *engine, struct link *link, const char *reason);
void link_free(struct link *link);
void link_wake(struct engine *engine, struct link *link);
void link_notify(struct engine *engine, struct link *link, const struct frame *frame);
void link_notify_block(struct engine *engine, struct link *link, const struct frame *frame,
                       char *block); /* takes the block over */
bool link_next_frame(struct engine *engine, struct link *link);
void link_frame_sent(struct engine *engine, struct link *link);
void link_let_go_of(struct link *link, struct cell *cell);
struct iovec link_place(struct engine *engine, struct link *link);
bool link_took(struct engine *engine, struct link *link, size_t bytes); /* false: link lost */

/* engine_sockets.c: a link's bytes through its socket, a bounded part in each turn. */
const char *socket_take(struct link *link, int fd); /* NULL, or what failed (errno) */
void socket_turn(struct engine *engine, struct link *link);
void socket_close(struct engine *engine, struct link *link);

/* engine_driven.c: a link's bytes through Python threads. */
void driven_turn(struct engine *engine, struct link *link);
void driven_sent(struct engine *engine, struct link *link);
void driven_received(struct engine *engine, struct link *link, uint32_t bytes);
void driven_lose(struct engine *engine, struct link *link, const char *reason);
/* For those threads: 1, 0 (timeout) or -1 (lost, with `reason`). */
void driven_enter(struct engine *engine);
int driven_wait_frame(struct engine *engine, struct link *link, double timeout_s,
                      struct frame *frame, uint64_t *cell_number, char **small, char *reason);
int driven_wait_place(struct engine *engine, struct link *link, double timeout_s, int *kind,
                      uint32_t *bytes, uint64_t *cell_number, uint64_t *offset, char *reason);
void driven_header(struct link *link, const char *header); /* before it is received */
void driven_coll(struct link *link, const char *bytes, size_t nbytes);
void driven_wait_for_nobody(struct engine *engine);

/* engine_coll_ports.c: small calls of Groups. */
void coll_execute(struct engine *engine, struct coll_request *asked); /* frees it */
int coll_sleep_ms(const struct engine *engine); /* the longest sleep of epoll; -1: forever */
bool coll_rung(void *pointer); /* whether an epoll event is from a doorbell */
void coll_answer(struct engine *engine);
const char *coll_frame(struct engine *engine, struct link *link, const struct frame *frame,
                        const char *bytes);
void coll_link_lost(struct engine *engine, struct link *link);
bool coll_cells_full(struct engine *engine, const struct batch *batch); /* whether it has voted */
void coll_end(struct engine *engine);

/* engine_fold.c */
int fold_accumulator(int op, int dtype); /* its dtype; -1: no such kernel */
size_t fold_item_bytes(int op, int dtype, bool accumulated, bool is_result);
struct fold *fold_new(struct cell *cell, int op, int dtype, size_t divisor, bool final,
                      struct cell *const *sources, const bool *accumulated, size_t count);
void fold_begin(struct engine *engine, struct fold *fold);
void fold_look(struct engine *engine, struct fold *fold);
void fold_step(struct engine *engine, struct fold *fold);
void fold_fail(struct engine *engine, struct fold *fold, const char *reason);
void fold_end(struct fold *fold);

#endif
