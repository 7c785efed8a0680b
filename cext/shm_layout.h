/* The layout of the control memory and of blocks in the store.
 *
 * Several processes that may be killed at any instruction read and write these words, so one file
 * defines their places and meanings. docs/architecture.md has the state tables.
 *
 *   control memory (sparse memfd, mapped whole by every client)
 *   ┌───────────┬─────────┬───────┬─────────┬────────┬────────┬────────┬─────────┬─────────┬───
 *   │root 64 KiB│ clients │ pools │ parking │ boards │ queues │ tables │ headers │ records │ …
 *   └───────────┴─────────┴───────┴─────────┴────────┴────────┴────────┴─────────┴─────────┴───
 *   … traces │ spans │ parts of small calls on one host │ small calls over hosts │
 *   store memory (sparse memfd, mapped whole): blocks, each a 64-byte head and its bytes
 */
#ifndef HOPLITE_SHM_LAYOUT_H
#define HOPLITE_SHM_LAYOUT_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#define SHM_MAGIC 0x31706d5f65746c70ULL /* "plte_mp1" */
#define SHM_VERSION 1

enum {
    CLIENTS = 256,          /* client slots; slot 0 is the node */
    MASK_WORDS = CLIENTS / 64,
    POOLS = 256,            /* pool 0: the cluster's own workers */
    PARKS = 256,            /* buckets of waiting clients */
    BOARDS = 64,            /* concurrent Groups */
    MEMBERS = 64,           /* ranks of a Group */
    PART_BYTES_MAX = 32768, /* what a rank gives to a call on the board itself. Higher: larger calls
                             * need no object. Lower: a Group of 64 that makes them takes less than
                             * the 2 MiB that this is, for as long as the host lives */
    PART_DIMS_MAX = 6,
    QUEUES = 512,           /* one for each (submitter, pool) */
    RING = 4096,            /* hints in a queue */
    BAG = RING / 4,         /* ranked hints, in the same memory */
    TABLES = 1024,
    TABLE_HEADERS = 4096,
    TABLE_WORDS = TABLE_HEADERS / 64,
    RETURNS = 4096,         /* ring of returned big blocks: hints for the node */
    SPANS = 1 << 22,        /* with a word; later spans stay with their lessee */
    NAME_BYTES = 32,
    ARGS_INLINE = 216,
    RESULT_INLINE = 192,
    BLOCK_ALIGN = 64,
    NODE_SLOT = 0,
    GLOBAL_FLAGS = 16,
    TRACE_OPEN = 256,       /* nested tasks in one process */
    TRACE_RING = 4096,      /* events of one process that its node has not collected */
    COLL_GIVEN_BYTES = 64 * 1024, /* total size of all members' parts of one small call */
    COLL_RECORD_BYTES = 66 * 1024, /* its result: the same size plus positions */
    COLL_HEAD_BYTES = 64 + 64 * MEMBERS, /* this part of a new Group must be empty */
};

/* state word of a header: | acquires 16 | generation 28 | attempt 8 | claimant 8 | state 4 | */
enum shm_state {
    ST_FREE = 0, ST_WAITING = 1, ST_QUEUED = 2, ST_CLAIMED = 3, ST_ABORTED = 4, ST_SEALED = 5,
    ST_FAILED = 6, ST_CANCELLED = 7, ST_DELETED = 8, ST_SPILLING = 9, ST_SPILLED = 10,
    ST_FREED = 11,
};
#define WORD_STATE(w) ((unsigned)((w) & 0xF))
#define WORD_CLAIMANT(w) ((unsigned)(((w) >> 4) & 0xFF))
#define WORD_ATTEMPT(w) ((unsigned)(((w) >> 12) & 0xFF))
#define WORD_GENERATION(w) ((uint32_t)(((w) >> 20) & 0xFFFFFFF))
#define WORD_ACQUIRE_ONE (1ULL << 48)
#define WORD_ACQUIRES_MASK (0xFFFFULL << 48)
#define WORD_MAKE(gen, attempt, claimant, state)                                                   \
    (((uint64_t)(gen) << 20) | ((uint64_t)(attempt) << 12) | ((uint64_t)(claimant) << 4) |         \
     (uint64_t)(state))
#define GENERATION_MASK 0xFFFFFFFU

/* local id: | table 16 | index 16 | generation 32 | */
#define ID_TABLE(id) ((unsigned)((id) >> 48))
#define ID_INDEX(id) ((unsigned)(((id) >> 32) & 0xFFFF))
#define ID_GENERATION(id) ((uint32_t)((id) & 0xFFFFFFFF))
#define ID_MAKE(table, index, gen)                                                                 \
    (((uint64_t)(table) << 48) | ((uint64_t)(index) << 32) | (uint64_t)(gen))

enum client_kind { CLIENT_NODE = 0, CLIENT_DRIVER = 1, CLIENT_WORKER = 2 };
enum shm_kind { KIND_PUT = 1, KIND_TASK = 2, KIND_OPERATION = 3, KIND_FOREIGN = 4,
                KIND_STREAM = 5, /* a link of a stream: its owner is woken when a hold on it ends */
                KIND_LENT = 6 /* its owner wants the bytes back, and is woken when a reader goes */ };
enum shm_flag {
    FLAG_INLINE = 1,        /* the payload is in the record's result area */
    FLAG_REFS = 2,          /* the payload lists refs */
    FLAG_ABORT_DELETE = 4,  /* ABORTED ends as DELETED, not CANCELLED */
    FLAG_RETURNED = 8,      /* the owner has returned the bytes (DELETED) */
    FLAG_ELSEWHERE = 16,    /* the node must be told when it is freed or deleted */
};

/* A header: 128 bytes, two cache lines.
 *   0        8                40               72      80     88      92   93    94    96     104
 *   ┌────────┬────────────────┬────────────────┬───────┬──────┬───────┬────┬─────┬─────┬──────┬───
 *   │ word   │ refs[4]        │ pins[4]        │ block │ size │ stamp │kind│flags│pool │ taken│ …
 *   └────────┴────────────────┴────────────────┴───────┴──────┴───────┴────┴─────┴─────┴──────┴───
 */
typedef struct {
    uint64_t word;
    uint64_t refs[MASK_WORDS];
    uint64_t pins[MASK_WORDS];
    uint64_t block;   /* byte offset of the payload in the store; 0 = none or inline */
    uint64_t size;    /* payload bytes */
    uint32_t stamp;   /* last use, in 1/64 s: eviction order */
    uint8_t kind;
    uint8_t flags;
    uint16_t pool;
    uint64_t taken;   /* the owner holds the refs inside */
    uint64_t spill;   /* offset in the spill file + 1 */
    float delay_first_s; /* RECORD_DELAYED: pauses between its tries; see Tasks.retry_pause */
    float delay_factor;
    float delay_max_s;
    uint32_t reserved;
} shm_header;
/* The flags of a record that matter here; others belong to submitters and workers. RANKED: its hint
 * is in a bag, not in a ring. RESOURCES: its node decides when it may begin. DELAYED: after a try
 * that counts against its retries it is WAITING until its submitter's node queues it again. */
enum {
    RECORD_ASYNC = 8, RECORD_RANKED = 0x1000, RECORD_RESOURCES = 0x2000, RECORD_DELAYED = 0x4000,
};
#define FLOOR_NONE INT32_MIN
static_assert(sizeof(shm_header) == 128, "header");
static_assert(offsetof(shm_header, pins) == 40 && offsetof(shm_header, block) == 72, "header");
static_assert(offsetof(shm_header, taken) == 96, "header");

/* A task record: 512 bytes, parallel to the header.
 *   0 function │ args │ lengths │ retries … │ timeout … output_owner │ 72 name │ 104 args │ 320 result
 */
typedef struct {
    uint64_t function;     /* local id of the function object */
    uint64_t args;         /* local id of the arguments' object; 0 = inline */
    uint32_t args_len;
    uint32_t result_len;
    uint16_t retries_left;
    uint16_t tries;        /* deaths so far */
    uint16_t flags;
    uint16_t concurrency;  /* TASK_ASYNC: concurrent tasks of a worker */
    uint64_t timeout_ns;   /* of running; 0 = none */
    uint64_t started_ns;
    int32_t priority;      /* RECORD_RANKED: requested by its submitter */
    int32_t floor;         /* the level of the task that sent it; FLOOR_NONE: no task */
    uint64_t submitted_ns;
    uint64_t output_owner;     /* id of the host whose driver gets its output; 0 = this host */
    char name[NAME_BYTES];
    uint8_t args_inline[ARGS_INLINE];
    uint8_t result_inline[RESULT_INLINE];
} shm_record;
static_assert(sizeof(shm_record) == 512, "record");
static_assert(offsetof(shm_record, args_inline) == 104, "record");
static_assert(offsetof(shm_record, result_inline) == 320, "record");

/* A table: the owner of 4096 headers, two bitmaps of news for that owner, one of news for the node,
 * two from which the node counts objects without reading their headers, and words with which it
 * finds a pool's tasks, 64 headers at a time: a bit may be superfluous, none is missing. */
typedef struct {
    uint32_t owner;        /* client slot + 1; 0 = free */
    uint32_t high;         /* headers ever used */
    uint64_t owner_generation;
    uint64_t pools;        /* pools with a word in pool_groups, since the table was taken */
    uint64_t pad[5];
    uint64_t done_summary;
    uint64_t pad2[7];
    uint64_t freed_summary;
    uint64_t gone_summary;
    uint64_t pad3[6];
    uint64_t done[TABLE_WORDS];
    uint64_t freed[TABLE_WORDS];
    uint64_t gone[TABLE_WORDS];  /* news for the node: marked FLAG_ELSEWHERE, freed or deleted */
    uint64_t used[TABLE_WORDS];  /* owner: headers in use */
    uint64_t open[TABLE_WORDS];  /* of those: results that are not done */
    uint64_t pool_groups[64]; /* owner: by pool (modulo 64), words with tasks of the pool */
} shm_table;
static_assert(sizeof(shm_table) == 192 + 6 * 512, "table");

/* End when idle; ask the node for a task between two tasks. */
enum client_retire { RETIRE_ENDS = 1, RETIRE_ASKS = 2 };
/* A stand-in: a worker in addition to its pool's number, started for a worker that waits inside a
 * task. It takes tasks (STANDS_IN), or sleeps while enough others can run tasks (STANDS_ASIDE),
 * until the node writes STANDS_IN. */
enum client_stands_in { STANDS_NOT = 0, STANDS_IN = 1, STANDS_ASIDE = 2 };
enum client_state { CLIENT_FREE = 0, CLIENT_LIVE = 1, CLIENT_DEAD = 2 };

/* A client slot: the client's own state, its wake-up words, its counters. */
typedef struct {
    uint32_t state;        /* node */
    uint32_t pid;
    uint32_t pool;
    uint32_t kind;         /* enum client_kind */
    uint64_t generation;
    uint64_t pad[5];
    uint32_t event;        /* futex: something is done or has changed */
    uint32_t sleeping;
    uint32_t returned;     /* another process has returned a block of its spans */
    uint32_t blocked;      /* waits inside a task */
    uint32_t stands_in;    /* enum client_stands_in */
    uint32_t pad3;
    uint64_t pad2[5];
    uint32_t task;         /* futex: a hint was posted */
    uint32_t retire;       /* node: flags of enum client_retire */
    uint64_t running;      /* local id of the running task */
    uint64_t deadline_ns;  /* 0 = none */
    uint64_t deadline_id;  /* of the task with that deadline: `running`, or an enclosing task */
    uint64_t waiting_id;   /* the awaited object, and the number of awaited objects; 0 = nothing */
    uint64_t waiting_n;
    uint64_t waiting_ns;   /* when the wait for waiting_last began */
    uint64_t waiting_last;
    uint64_t tasks_done;
    uint64_t tasks_failed;
    uint64_t puts;
    uint64_t put_bytes;
    uint64_t parked_news[PARKS / 64]; /* buckets in which it is parked and an object became done */
} shm_client;
static_assert(sizeof(shm_client) == 256, "client");

typedef struct {
    uint32_t owner;        /* client slot + 1 */
    uint32_t pool;
    uint32_t here;         /* 1: tasks of other hosts, which must not be sent on */
    uint32_t bag;          /* 1: its hints are the ranked ones of shm_bag.h */
    uint64_t pad[6];
    uint64_t head;         /* consumers, by CAS */
    uint64_t pad2[7];
    uint64_t tail;         /* the one producer; of a bag: the number of hints ever posted */
    uint32_t bag_high;     /* the one producer: later entries of a bag are empty */
    uint32_t pad0;
    uint64_t pad3[6];
    uint64_t ring[RING];
} shm_queue;
static_assert(sizeof(shm_queue) == 192 + 8 * RING, "queue");

/* A ranked hint. The id is written last, and removed by a CAS to 0. */
typedef struct {
    uint64_t id;           /* 0 = free */
    int32_t level;         /* the higher one of a task's priority and its floor */
    int32_t priority;
    uint32_t order;        /* within its bag */
    uint32_t nearness;     /* whether another task may be waiting for it; see hint_nearness() */
    uint64_t pad;
} shm_hint;
static_assert(sizeof(shm_hint) == 32, "hint");

typedef struct {
    uint32_t state;        /* 0 free, 1 open, 2 closing */
    uint32_t ranked;  /* 1: a bag to this pool, or to an earlier pool of its number, was opened */
    uint32_t stand_ins;    /* number of its stand-ins; only the node changes it */
    uint32_t declined;     /* 1: a regular worker sleeps, because enough others run tasks */
    uint64_t pad2[2];
    uint64_t concurrent[MASK_WORDS];   /* run async tasks, and sleep until there is another */
    uint64_t idle[MASK_WORDS];     /* sleeping workers: wake one for a hint */
    uint64_t spinning[MASK_WORDS]; /* workers that poll the queues */
} shm_pool;
static_assert(sizeof(shm_pool) == 128, "pool");

typedef struct {
    uint64_t seq;          /* last call published + 1; 0 = none */
    uint64_t start;        /* first call it takes part in + 1; 0 = not admitted */
    uint64_t contribution; /* local id; 0: the part is on the board */
    uint64_t client;       /* slot + 1 */
    uint64_t news;         /* node: counts news about messages to this member */
    uint64_t pad[3];
} shm_member;
static_assert(sizeof(shm_member) == 64, "member");

typedef struct {
    uint32_t used;
    uint32_t size;
    uint64_t generation;
    uint64_t alive;        /* node writes */
    uint64_t joining;      /* node writes */
    uint32_t formed;
    uint32_t epoch;        /* counts changes of the masks */
    uint64_t result_id;    /* the commit: id first (0: the result is on the board), */
    uint64_t result_call;  /* then call + 1 */
    uint64_t pad[9];
    shm_member members[MEMBERS];
} shm_board;
static_assert(sizeof(shm_board) == 128 + 64 * MEMBERS, "board");

/* Kinds of calls of a Group. Up to reduce_scatter all parts have the same form; the others have
 * separate forms. Boards have no split. Python reads the names from here. */
#define CALL_KINDS(_)                                                                              \
    _(BARRIER, "barrier") _(ALLREDUCE, "allreduce") _(REDUCE, "reduce")                            \
    _(REDUCE_SCATTER, "reduce_scatter") _(BROADCAST, "broadcast") _(GATHER, "gather")              \
    _(ALLGATHER, "allgather") _(SPLIT, "split")
#define CALL_NUMBER(name, text) CALL_##name,
#define CALL_NAME(name, text) text,
enum call_kind { CALL_KINDS(CALL_NUMBER) CALL_KIND_COUNT };
static const char *const call_kind_names[] = {CALL_KINDS(CALL_NAME)};
/* Equal for all ranks of a small call: compared as bytes. */
typedef struct {
    uint8_t kind;          /* enum call_kind */
    uint8_t op;            /* enum reduce_op */
    uint8_t dtype;         /* enum reduce_dtype */
    uint8_t ndim;
    uint16_t root;
    uint16_t buffered;     /* 1: parts are in call buffers, and each rank reads what it needs */
    uint64_t nbytes;
    uint64_t shape[PART_DIMS_MAX];
} shm_form;
static_assert(sizeof(shm_form) == 64, "form");
/* One rank's part of a small call; the slot after the last rank's is for results. */
typedef struct {
    uint64_t changes;      /* odd while its rank writes */
    uint64_t mask;         /* of a result: the ranks with parts in it */
    uint64_t buffers[2];   /* of the latest even and odd calls with buffers: offset in the store */
    uint64_t pad[4];
    shm_form form;
    uint8_t data[PART_BYTES_MAX];
} shm_part;
static_assert(sizeof(shm_part) == 128 + PART_BYTES_MAX, "part");
/* Small calls of a Group over several hosts (engine_coll.h). Each member of this host writes its
 * part into its share of `given`, then its seq, then to its doorbell. The engine's thread writes
 * the result into `record`, then the call's number. A member gives its part of call k + 1 only
 * after it has read the result of call k. */
typedef struct {
    uint64_t seq;          /* last call given + 1; 0 = none */
    uint32_t nbytes;
    uint32_t offset;       /* of the elements in the payload */
    uint8_t kind, op, dtype, root;
    uint32_t pad[11];
} shm_coll_part;
static_assert(sizeof(shm_coll_part) == 64, "small part");
typedef struct {
    uint64_t open;         /* node: members may expect that small calls stay here */
    uint64_t done;         /* engine: last call committed here + 1 */
    uint64_t pad[6];
    shm_coll_part parts[MEMBERS];
    char given[COLL_GIVEN_BYTES]; /* in shares of coll_share(size) */
    char record[COLL_RECORD_BYTES];
} shm_coll;
static_assert(sizeof(shm_coll) == 64 + 64 * MEMBERS + COLL_GIVEN_BYTES + COLL_RECORD_BYTES,
              "small calls");
static inline uint32_t coll_share(uint32_t size) {
    return COLL_GIVEN_BYTES / (size ? size : 1) / 64 * 64;
}

typedef struct {
    uint64_t magic;
    uint32_t version;
    uint32_t closing;
    uint64_t host_id;      /* random id of this host's store */
    uint64_t store_bytes;  /* length of the store memfd (address space, not memory) */
    uint32_t tables_high;
    uint32_t queues_high;
    uint32_t hungry;       /* node: waits for bytes, and must be told of every return */
    uint32_t tracing;      /* node: clients must record events in their rings */
    uint32_t cores;
    uint32_t spin_us_max;
    uint64_t small_object_bytes_max;
    uint64_t span_bytes;
    uint64_t spinners[MASK_WORDS];
    uint64_t returns_next;
    uint64_t gone_tables[TABLES / 64]; /* tables with a bit in `gone` */
    /* client slot + 1 of the process that writes a large value through the file; 0: none */
    uint32_t file_writer;
    uint32_t resources;    /* node: counts changes of the resources of the cluster's nodes */
    uint32_t removed;      /* node: 1 once remove_node has made it leave the cluster */
    uint32_t printed;      /* counts writes of lines for drivers of this host */
    uint64_t pad[14];
    uint64_t returns[RETURNS]; /* payload offset | lap: a process killed here leaves another lap */
} shm_root;
static_assert(sizeof(shm_root) <= 65536, "root");

/* A block: a 64-byte head before the payload. owner: 0 free, BLOCK_LEASED, or a local id. */
#define BLOCK_LEASED 0xFFFFFFFFFFFFFFFFULL
#define RETURN_LAP(at) (((at) / RETURNS + 1) % BLOCK_ALIGN) /* at first never that of fresh memory */
typedef struct {
    uint64_t owner;
    uint64_t bytes;        /* including the head */
    uint32_t lessee;       /* client slot; NODE_SLOT for big blocks */
    uint32_t big;
    uint64_t generation;   /* client generation of the lessee */
    uint64_t pad[4];
} shm_block;
static_assert(sizeof(shm_block) == BLOCK_ALIGN, "block head");

enum event_kind { EVENT_TASK = 0, EVENT_GROUP_CALL = 1 };
enum event_outcome { OUTCOME_RUNNING = 0, OUTCOME_DONE = 1, OUTCOME_FAILED = 2, OUTCOME_CANCELLED = 3 };
/* An event of a client: 80 bytes, times of CLOCK_MONOTONIC. */
typedef struct {
    uint64_t id;           /* local id of the task; number of the call */
    uint64_t begin_ns;
    uint64_t end_ns;
    uint8_t kind;          /* enum event_kind */
    uint8_t outcome;       /* enum event_outcome */
    uint16_t depth;        /* 1: not inside another task */
    uint32_t rank;         /* of a member of a Group */
    char name[NAME_BYTES];
    uint64_t bytes_in;     /* arguments of the task; what the member gives to the call */
    uint64_t bytes_out;    /* result of the task; 0 if unknown, and for calls */
} shm_event;
static_assert(sizeof(shm_event) == 80, "event");

/* The tasks that a client is running (open[0 .. depth)), and its events. Only the client writes
 * here, except for `head`; `changes` is odd while it changes `open` or `depth`. */
typedef struct {
    uint64_t tail;         /* events ever written into the ring */
    uint32_t changes;
    uint32_t depth;
    uint64_t pad[6];
    uint64_t head;         /* node: events ever collected */
    uint64_t pad2[7];
    shm_event open[TRACE_OPEN];
    shm_event ring[TRACE_RING];
} shm_trace;
static_assert(sizeof(shm_trace) == 128 + 80 * (TRACE_OPEN + TRACE_RING), "trace");

#define OFF_CLIENTS 65536ULL
#define OFF_POOLS (OFF_CLIENTS + CLIENTS * sizeof(shm_client))
#define OFF_PARKS (OFF_POOLS + POOLS * sizeof(shm_pool))
#define OFF_BOARDS (OFF_PARKS + PARKS * MASK_WORDS * 8ULL)
#define OFF_QUEUES (OFF_BOARDS + BOARDS * sizeof(shm_board))
#define OFF_TABLES (OFF_QUEUES + QUEUES * sizeof(shm_queue))
#define OFF_HEADERS ((OFF_TABLES + TABLES * sizeof(shm_table) + 4095) & ~4095ULL)
#define OFF_RECORDS (OFF_HEADERS + (uint64_t)TABLES * TABLE_HEADERS * sizeof(shm_header))
#define OFF_TRACES (OFF_RECORDS + (uint64_t)TABLES * TABLE_HEADERS * sizeof(shm_record))
#define OFF_SPANS (OFF_TRACES + (uint64_t)CLIENTS * sizeof(shm_trace))
#define OFF_PARTS (OFF_SPANS + (uint64_t)SPANS * 8)
#define OFF_COLL (OFF_PARTS + (uint64_t)BOARDS * (MEMBERS + 1) * sizeof(shm_part))
#define CONTROL_BYTES (OFF_COLL + (uint64_t)BOARDS * sizeof(shm_coll))
#define ROOT_BYTES ((OFF_BOARDS + 4095) & ~4095ULL) /* what create() writes */
static_assert(CLIENTS <= 256 && TABLE_HEADERS <= 65536 && TABLES <= 65536, "fields of the words");
static_assert(TABLE_WORDS == 64, "one summary word");

static inline shm_root *root_of(char *c) { return (shm_root *)c; }
static inline shm_client *client_of(char *c, unsigned i) {
    return (shm_client *)(c + OFF_CLIENTS) + i;
}
static inline shm_pool *pool_of(char *c, unsigned i) { return (shm_pool *)(c + OFF_POOLS) + i; }
static inline uint64_t *park_of(char *c, unsigned i) {
    return (uint64_t *)(c + OFF_PARKS) + (size_t)i * MASK_WORDS;
}
static inline shm_board *board_of(char *c, unsigned i) { return (shm_board *)(c + OFF_BOARDS) + i; }
static inline shm_part *part_of(char *c, unsigned board, unsigned rank) {
    return (shm_part *)(c + OFF_PARTS) + (size_t)board * (MEMBERS + 1) + rank;
}
static inline shm_coll *coll_of(char *c, unsigned i) { return (shm_coll *)(c + OFF_COLL) + i; }
static inline shm_queue *queue_of(char *c, unsigned i) { return (shm_queue *)(c + OFF_QUEUES) + i; }
static inline shm_table *table_of(char *c, unsigned i) { return (shm_table *)(c + OFF_TABLES) + i; }
static inline shm_header *header_at(char *c, unsigned table, unsigned index) {
    return (shm_header *)(c + OFF_HEADERS) + (size_t)table * TABLE_HEADERS + index;
}
static inline shm_record *record_at(char *c, unsigned table, unsigned index) {
    return (shm_record *)(c + OFF_RECORDS) + (size_t)table * TABLE_HEADERS + index;
}
static inline shm_trace *trace_of(char *c, unsigned i) { return (shm_trace *)(c + OFF_TRACES) + i; }
static inline uint64_t *spans_of(char *c) { return (uint64_t *)(c + OFF_SPANS); }
static inline int id_valid(uint64_t id) {
    return ID_TABLE(id) < TABLES && ID_INDEX(id) < TABLE_HEADERS;
}
static inline shm_header *header_of(char *c, uint64_t id) {
    return header_at(c, ID_TABLE(id), ID_INDEX(id));
}
static inline shm_record *record_of(char *c, uint64_t id) {
    return record_at(c, ID_TABLE(id), ID_INDEX(id));
}

#define LOAD(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define ADD(p, v) __atomic_fetch_add((p), (v), __ATOMIC_SEQ_CST)
#define OR(p, v) __atomic_fetch_or((p), (v), __ATOMIC_SEQ_CST)
#define AND(p, v) __atomic_fetch_and((p), (v), __ATOMIC_SEQ_CST)
#define SWAP(p, v) __atomic_exchange_n((p), (v), __ATOMIC_SEQ_CST)
static inline int CAS64(uint64_t *p, uint64_t expected, uint64_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
static inline int CAS32(uint32_t *p, uint32_t expected, uint32_t desired) {
    return __atomic_compare_exchange_n(p, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

#endif
