/* The frames between two engines.
 *
 * These 64 bytes contain everything that a peer can make this process do. They are checked here,
 * before they are interpreted.
 *
 *      0        2      3        4        8
 *      ┌────────┬──────┬────────┬────────┬─────────────────────────┐
 *    0 │ magic  │ type │ reason │ length │        operation        │
 *      ├────────┴──────┴────────┼────────┼────────────┬────────────┤
 *   16 │ epoch  │    stripe     │  part  │    pull    │            │
 *      ├────────┴───────────────┴────────┼────────────┴────────────┤
 *   32 │ incarnation of the sender       │         offset          │
 *      ├─────────────────────────────────┼────────────┬────────────┤
 *   48 │ end                             │ block_crc  │ header_crc │
 *      └─────────────────────────────────┴────────────┴────────────┘
 *   then `length` bytes: the block (DATA), or the parts (SMALL)
 *
 *   REQUEST  requests bytes [offset, end) of the cell with this key; `end` is its whole size. The
 *            number `pull` is in use until all bytes have arrived, or REFUSED.
 *   DATA     bytes [offset, offset + length) of that pull, in order, without gaps.
 *   REFUSED  the end of that pull, with its `reason`. Also the answer to CANCEL.
 *   CANCEL   cancels that pull. DATA in transit is still read from the stream.
 *   SMALL    the parts of the sender's members in a small call of a Group (engine_coll.h): operation
 *            is the Group's generation, offset the call, end the version of its members, part the
 *            kind of frame (enum coll_phase), epoch the named plan.
 *
 * Little-endian. header_crc is crc32c of the 60 bytes before it, on every link; block_crc that of
 * the block if the link has checksums, otherwise 0 (TLS has its own).
 */
#ifndef ENGINE_FRAMES_H
#define ENGINE_FRAMES_H

#include <stddef.h>
#include <stdint.h>

enum {
    FRAME_BYTES = 64,
    FRAME_MAGIC = 0x4801, /* 'H' and the version */
    FRAME_COLL_PHASES = 4, /* COLL_PHASE_END of engine_coll.h */
    /* The longest block, which is the longest delay of a peer when streams take turns. */
    FRAME_BLOCK_BYTES_MAX = 1024 * 1024,
    FRAME_COLL_BYTES_MAX = 65 * 1024, /* the maximum that engine_coll.h sends */
};

enum frame_type { FRAME_REQUEST = 1, FRAME_DATA, FRAME_REFUSED, FRAME_CANCEL, FRAME_COLL,
                  FRAME_TYPE_END };

enum frame_reason {
    REASON_NONE,
    REASON_CLOSED,    /* the cell was closed while it was served */
    REASON_SIZE,      /* the cell ends before the requested bytes */
    REASON_FULL,      /* too many requests of this link are waiting */
    REASON_CANCELLED, /* the answer to CANCEL */
    REASON_END
};

struct frame_key {
    uint64_t operation;
    uint32_t epoch, stripe, part;
};

struct frame {
    uint16_t magic;
    uint8_t type, reason;
    uint32_t length;
    uint64_t operation;
    uint32_t epoch, stripe, part, pull;
    uint64_t incarnation, offset, end;
    uint32_t block_crc, header_crc;
};

_Static_assert(sizeof(struct frame) == FRAME_BYTES, "the header has no padding");
_Static_assert(offsetof(struct frame, length) == 4 && offsetof(struct frame, operation) == 8, "");
_Static_assert(offsetof(struct frame, epoch) == 16 && offsetof(struct frame, pull) == 28, "");
_Static_assert(offsetof(struct frame, incarnation) == 32 && offsetof(struct frame, end) == 48, "");
_Static_assert(offsetof(struct frame, block_crc) == 56, "as drawn");
_Static_assert(offsetof(struct frame, header_crc) == FRAME_BYTES - 4, "the last word");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the header is copied as it stands");

/* The crc32c (Castagnoli) of `bytes` bytes, continued from `crc`; the first call starts with 0. */
uint32_t crc32c(uint32_t crc, const void *data, size_t bytes);
/* The same without carry-less products, and without the CPU's instruction: for other CPUs, and to
 * test the methods against each other. */
uint32_t crc32c_by_instruction(uint32_t crc, const void *data, size_t bytes);
uint32_t crc32c_by_table(uint32_t crc, const void *data, size_t bytes);

/* Writes header_crc. */
void frame_seal(struct frame *frame);
/* NULL, or what is wrong with the header by itself. */
const char *frame_fault(const struct frame *frame);

static inline struct frame_key frame_key(const struct frame *frame) {
    return (struct frame_key){frame->operation, frame->epoch, frame->stripe, frame->part};
}

static inline int frame_key_equal(const struct frame_key *a, const struct frame_key *b) {
    return a->operation == b->operation && a->epoch == b->epoch && a->stripe == b->stripe &&
           a->part == b->part;
}

#endif
