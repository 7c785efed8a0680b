/* Calls of a Group whose members share one memory, without objects and Python.
 *
 * A barrier, or a reduction of a few KiB, costs less than one object would, let alone one pickled,
 * held and read object for each rank. Parts are in slots of the board (shm_part). The lowest living
 * rank folds them in the order of ranks, and commits by storing the call's number, as for any call
 * (docs/architecture.md, "Group board"). So a reader that sees the commit also sees mask and bytes.
 *
 *   part 0 ──┐
 *   part 1 ──┼─ folded by the leader ──► result ── result_id = 0, result_call = call + 1 ──► all copy
 *   part 2 ──┘
 *
 * A slot is written again only for the next call, which its rank makes after this one is committed,
 * and therefore after the leader has read the slot. If another member takes a rank's place,
 * `changes` and the board's epoch show that before the commit. The leader of the next call writes
 * the result's slot when all ranks have made that call, and therefore after all have read this
 * result.
 * Larger parts, and all parts of a broadcast, gather, allgather or reduce_scatter, are in *call
 * buffers*: two for each rank, in the store, for even and odd calls. The leader only
 * compares their dtypes and shapes, and commits the call. Each rank then reads all parts and folds
 * its own result:
 *
 *   part 0 ──┐                                        ┌─► rank 0 folds, or copies
 *   part 1 ──┼─ forms compared by the leader ── commit┼─► rank 1 folds, or copies
 *   part 2 ──┘                                        └─► rank 2 folds, or copies
 *
 * All folds have the order of ranks, so all results have the same bits. The buffer of call k is
 * written again for call k + 2. No rank begins that call before k + 1 is committed, and every rank
 * has read call k before it makes k + 1. A rank that joins may begin call k + 2 earlier, so it uses
 * no buffer in its first call (board_give).
 */
#ifndef HOPLITE_SHM_BOARD_H
#define HOPLITE_SHM_BOARD_H

#include "reduce_kernels.h"
#include "shm_tasks.h"

enum board_turn {
    TURN_WAIT = 0,   /* another rank's turn, or too early */
    TURN_AGAIN = 1,  /* something has changed meanwhile */
    TURN_OVER = 2,   /* the call is committed, with its result on the board */
    TURN_OTHER = 3,  /* not for this file: an object, a difference, a joining rank */
};

static inline int takes_part(shm_member *m, uint64_t call) {
    uint64_t start = LOAD(&m->start);
    return 0 < start && start <= call + 1;
}
/* Wakes the possible leaders of the call: ranks up to the lowest living participant. Others are
 * woken for a change of the masks. */
static inline void wake_leaders(char *c, shm_board *b, uint64_t call) {
    uint64_t alive = LOAD(&b->alive), members = alive | LOAD(&b->joining);
    for (; members; members &= members - 1) {
        unsigned rank = (unsigned)__builtin_ctzll(members);
        uint64_t client = LOAD(&b->members[rank].client);
        if (client)
            wake_client(c, (unsigned)(client - 1));
        if (alive >> rank & 1 && takes_part(&b->members[rank], call))
            return;
    }
}

/* Whether a slot is unchanged since `changes` was read. Call it after reading the slot. */
static inline int part_unchanged(shm_part *p, uint64_t changes) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* no load moves behind the one below */
    return LOAD(&p->changes) == changes;
}

/* The elements of a rank's part of a call with buffers. The form of the part precedes them. */
static inline char *buffered_part(char *c, char *store, unsigned board, unsigned rank,
                                  uint64_t call) {
    return store + part_of(c, board, rank)->buffers[call & 1] + sizeof(shm_form);
}

/* Writes a part and publishes it. buffer: the offset in the store of the part's call buffer; 0: the
 * part is on the board, or there is none. Returns 0 if nothing was written, because others may
 * still read that buffer. */
static inline int board_give(char *c, char *store, unsigned board, unsigned rank, uint64_t call,
                             const shm_form *form, const void *data, uint64_t buffer) {
    shm_board *b = board_of(c, board);
    shm_part *p = part_of(c, board, rank);
    if (buffer && (LOAD(&b->members[rank].seq) > call || LOAD(&b->result_call) < call))
        return 0;
    ADD(&p->changes, 1 + (LOAD(&p->changes) & 1)); /* odd, even if a dead process left it odd */
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* no store below moves before the count */
    p->form = *form;
    char *to = (char *)p->data;
    if (buffer) {
        p->buffers[call & 1] = buffer;
        memcpy(store + buffer, form, sizeof *form);
        to = store + buffer + sizeof *form;
    }
    if (form->nbytes)
        memcpy(to, data, form->nbytes);
    ADD(&p->changes, 1);
    STORE(&b->members[rank].contribution, 0);
    STORE(&b->members[rank].seq, call + 1);
    wake_leaders(c, b, call);
    return 1;
}

/* Folds elements of the parts of a committed call with buffers. */
static inline void board_fold(char *c, char *store, unsigned board, uint64_t call, uint64_t mask,
                              const shm_form *form, size_t first, size_t count, void *out) {
    const struct reduce_kernel *kernel = reduce_kernel_find(form->op, form->dtype);
    const void *sources[MEMBERS];
    unsigned n = 0;
    for (; mask; mask &= mask - 1) {
        char *part = buffered_part(c, store, board, (unsigned)__builtin_ctzll(mask), call);
        sources[n++] = part + first * reduce_source_bytes(kernel);
    }
    reduce_run(kernel, sources, n, out, count, 1);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the members are checked after the parts were read */
}

/* Copies from a call buffer. */
static inline void board_copy(void *out, const char *part, size_t nbytes) {
    memcpy(out, part, nbytes);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* as above */
}

/* Whether this client is still the member of that rank. Called after reading memory that may be
 * rewritten without that member. -1: the node is changing the members. */
static inline int board_holds(char *c, unsigned board, unsigned rank, uint64_t client,
                              uint64_t generation) {
    shm_board *b = board_of(c, board);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* no load moves behind those below */
    uint32_t epoch = LOAD(&b->epoch);
    uint64_t members = LOAD(&b->alive) | LOAD(&b->joining);
    if (LOAD(&b->generation) != generation || LOAD(&b->members[rank].client) != client + 1)
        return 0;
    if (members >> rank & 1)
        return 1;
    return epoch & 1 || LOAD(&b->epoch) != epoch ? -1 : 0;
}

/* Whether these parts belong to one call. */
static inline int forms_agree(const shm_form *one, const shm_form *other) {
    if (one->kind < CALL_BROADCAST || other->kind < CALL_BROADCAST)
        return !memcmp(one, other, sizeof *one);
    return one->kind == other->kind && one->root == other->root;
}

/* The slots of the ranks that have not published `call` yet; if all have, the leader's. */
static inline void still_busy(shm_board *b, uint64_t call, unsigned rank, uint64_t *busy) {
    uint64_t members = LOAD(&b->alive);
    int64_t leader = -1;
    int missing = 0;
    memset(busy, 0, MASK_WORDS * sizeof *busy);
    for (; members; members &= members - 1) {
        unsigned other = (unsigned)__builtin_ctzll(members);
        shm_member *m = &b->members[other];
        uint64_t client = LOAD(&m->client);
        if (!client || !takes_part(m, call))
            continue;
        if (leader < 0)
            leader = (int64_t)client - 1;
        if (other != rank && LOAD(&m->seq) < call + 1) {
            busy[(client - 1) / 64] |= 1ULL << ((client - 1) % 64);
            missing = 1;
        }
    }
    if (!missing && leader >= 0)
        busy[leader / 64] |= 1ULL << (leader % 64);
}

/* Leads the call if it is this rank's turn and all parts are present. Nothing is visible before the
 * commit. */
static inline int board_lead(char *c, unsigned board, unsigned rank, uint64_t call) {
    shm_board *b = board_of(c, board);
    uint32_t epoch = LOAD(&b->epoch);
    uint64_t alive = LOAD(&b->alive), joining = LOAD(&b->joining), mask = 0, changes[MEMBERS];
    const void *sources[MEMBERS];
    unsigned n = 0;
    if (epoch & 1)
        return TURN_WAIT; /* the node is changing the membership, and will wake us */
    /* An earlier leader commits before the membership that ends its lead can change. */
    if (LOAD(&b->result_call) > call)
        return TURN_AGAIN;
    for (uint64_t rest = alive | joining; rest; rest &= rest - 1) {
        unsigned other = (unsigned)__builtin_ctzll(rest);
        shm_member *m = &b->members[other];
        if (!takes_part(m, call))
            continue;
        if (!mask && other != rank)
            return TURN_WAIT; /* another rank leads */
        if (LOAD(&m->seq) < call + 1)
            return TURN_WAIT;
        mask |= 1ULL << other;
    }
    if (!(mask >> rank & 1))
        return TURN_WAIT;
    if (LOAD(&b->epoch) != epoch)
        return TURN_AGAIN;
    if (mask & joining)
        return TURN_OTHER; /* the node must admit them */
    const shm_form *form = &part_of(c, board, rank)->form;
    for (uint64_t rest = mask; rest; rest &= rest - 1) {
        unsigned other = (unsigned)__builtin_ctzll(rest);
        shm_part *p = part_of(c, board, other);
        if (LOAD(&b->members[other].contribution))
            return TURN_OTHER;
        changes[n] = LOAD(&p->changes);
        if (changes[n] & 1)
            return TURN_AGAIN;
        if (!forms_agree(&p->form, form))
            return part_unchanged(p, changes[n]) ? TURN_OTHER : TURN_AGAIN;
        sources[n++] = p->data;
    }
    int has_root = form->kind == CALL_REDUCE || form->kind == CALL_GATHER ||
                   form->kind == CALL_BROADCAST;
    if (has_root && !(mask >> form->root & 1))
        return TURN_OTHER; /* its root is gone */
    shm_part *result = part_of(c, board, MEMBERS);
    result->form = *form;
    if (form->kind != CALL_BARRIER && !form->buffered && form->nbytes) {
        const struct reduce_kernel *kernel = reduce_kernel_find(form->op, form->dtype);
        size_t count = form->nbytes / reduce_source_bytes(kernel);
        reduce_run(kernel, sources, n, result->data, count, 1);
    }
    result->mask = mask;
    unsigned i = 0;
    for (uint64_t rest = mask; rest; rest &= rest - 1)
        if (!part_unchanged(part_of(c, board, (unsigned)__builtin_ctzll(rest)), changes[i++]))
            return TURN_AGAIN;
    if (LOAD(&b->epoch) != epoch)
        return TURN_AGAIN;
    STORE(&b->result_id, 0);
    STORE(&b->result_call, call + 1); /* the commit */
    for (uint64_t rest = mask & ~(1ULL << rank); rest; rest &= rest - 1) {
        uint64_t client = LOAD(&b->members[__builtin_ctzll(rest)].client);
        if (client)
            wake_client(c, (unsigned)(client - 1));
    }
    return TURN_OVER;
}

/* Checks once what this rank must do about a call that it has published. */
static inline int board_turn(char *c, unsigned board, unsigned rank, uint64_t call) {
    shm_board *b = board_of(c, board);
    if (LOAD(&b->result_call) > call)
        return LOAD(&b->result_id) ? TURN_OTHER : TURN_OVER;
    return board_lead(c, board, rank, call);
}

/* Waits until the call is over, or not for this file, or the deadline (TURN_WAIT: also after a
 * signal, or if the node is gone). Spins once, for spin_us_max in all, and only if there is a core
 * for each awaited client, besides those that spin. */
static inline int board_wait(char *c, unsigned board, unsigned slot, unsigned rank, uint64_t call,
                             uint64_t deadline) {
    shm_client *me = client_of(c, slot);
    uint64_t spin_until = 0, now, busy[MASK_WORDS];
    int turn, spinning = 0;
    for (;;) {
        uint32_t seen = LOAD(&me->event);
        turn = board_turn(c, board, rank, call);
        if (turn == TURN_AGAIN && now_ns() < deadline)
            continue; /* a rank that pauses while it writes is awaited elsewhere */
        if (turn == TURN_AGAIN)
            turn = TURN_WAIT;
        if (turn != TURN_WAIT)
            break;
        now = now_ns();
        if (!spin_until) {
            spin_until = now + (uint64_t)root_of(c)->spin_us_max * 1000;
            still_busy(board_of(c, board), call, rank, busy);
            spinning = spin_until > now && spin_begin(c, slot, busy);
        }
        if (spinning) {
            while (now < spin_until && LOAD(&me->event) == seen && !LOAD(&private_of(c)->lost)) {
                pause_burst();
                now = now_ns();
            }
            if (LOAD(&me->event) != seen && now < spin_until)
                continue;
            spin_end(c, slot);
            spinning = 0;
        }
        int n = 0;
        if (wait_for(c, slot, NULL, &n, -1, NULL, 0, &seen, 0, deadline) != WAIT_DONE)
            break;
    }
    if (spinning)
        spin_end(c, slot);
    return turn;
}
#endif
