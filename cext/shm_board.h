/* Calls of a Group whose members share one memory, as far as they need no object and no Python.
 *
 * A barrier, or a reduction of a few KiB, costs less than one object would, let alone one for each
 * rank, pickled, held and read. Parts lie in slots of the board (shm_part), the lowest living rank
 * folds them in the order of ranks and commits by the store of the call's number, as for any call
 * (docs/architecture.md, "Group board"): so those that see the commit find mask and bytes.
 *
 *   part 0 ──┐
 *   part 1 ──┼─ folded by the leader ──► result ── result_id = 0, result_call = call + 1 ──► all copy
 *   part 2 ──┘
 *
 * A slot is written again only for the next call, which its rank makes when this one is committed,
 * so when the leader has read it; another member in the place of one that is gone is noticed by
 * `changes` and by the board's epoch before the commit.
 * The result's slot is written by the leader of the next call when all ranks have made that, so when
 * all have read this one.
 * Larger parts, and all parts of a broadcast, gather, allgather or reduce_scatter, lie in *call
 * buffers*: two for each rank, in the store, for even and odd calls. The leader only checks their
 * forms and commits, and each rank then reads all parts, and folds what it needs for itself:
 *
 *   part 0 ──┐                                        ┌─► rank 0 folds, or copies
 *   part 1 ──┼─ forms compared by the leader ── commit┼─► rank 1 folds, or copies
 *   part 2 ──┘                                        └─► rank 2 folds, or copies
 *
 * All folds have the order of ranks, so all results have the same bits. The buffer of call k is
 * written again for call k + 2. No rank begins that call before k + 1 is committed, and every rank
 * has read call k before it makes k + 1. A rank that joins may begin call k + 2 earlier, so it does
 * without a buffer in its first call (board_give).
 */
#ifndef HOPLITE_SHM_BOARD_H
#define HOPLITE_SHM_BOARD_H

#include "reduce_kernels.h"
#include "shm_tasks.h"

enum board_turn {
    TURN_WAIT = 0,   /* not this rank's, or not yet */
    TURN_AGAIN = 1,  /* something has changed meanwhile */
    TURN_OVER = 2,   /* the call is committed, and its result lies on the board */
    TURN_OTHER = 3,  /* it is not for this file: an object, a difference, a rank that joins */
};

static inline int takes_part(shm_member *m, uint64_t call) {
    uint64_t start = LOAD(&m->start);
    return 0 < start && start <= call + 1;
}
/* Whoever may lead that call: ranks up to the lowest one that lives and takes part. Others learn of
 * a change of the masks by being woken for it. */
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

/* Is a slot as it was when `changes` was read? After all that was read of it in between. */
static inline int part_unchanged(shm_part *p, uint64_t changes) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST); /* no load moves behind the one below */
    return LOAD(&p->changes) == changes;
}

/* Where the elements of a rank's part of a call with buffers lie; the form of the part comes first. */
static inline char *buffered_part(char *c, char *store, unsigned board, unsigned rank,
                                  uint64_t call) {
    return store + part_of(c, board, rank)->buffers[call & 1] + sizeof(shm_form);
}

/* Writes a part and publishes it. buffer: the offset in the store of the call buffer in which the
 * part is to lie; 0: it lies on the board, or there is none. 0 is returned if nothing was written,
 * because others may still read that buffer. */
static inline int board_give(char *c, char *store, unsigned board, unsigned rank, uint64_t call,
                             const shm_form *form, const void *data, uint64_t buffer) {
    shm_board *b = board_of(c, board);
    shm_part *p = part_of(c, board, rank);
    if (buffer && (LOAD(&b->members[rank].seq) > call || LOAD(&b->result_call) < call))
        return 0;
    ADD(&p->changes, 1 + (LOAD(&p->changes) & 1)); /* odd, also if it was left odd by a dead one */
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

/* Folds elements of the parts of a call with buffers, which is committed. */
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
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* the members are looked at after the parts were read */
}

/* Copies from a call buffer. */
static inline void board_copy(void *out, const char *part, size_t nbytes) {
    memcpy(out, part, nbytes);
    __atomic_thread_fence(__ATOMIC_ACQUIRE); /* as above */
}

/* Is this client still the member of that rank? Members wait for one that is. It is asked after
 * what may be written again without that member was read. -1: the node is changing the members. */
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

/* Are these parts of one call? */
static inline int forms_agree(const shm_form *one, const shm_form *other) {
    if (one->kind < CALL_BROADCAST || other->kind < CALL_BROADCAST)
        return !memcmp(one, other, sizeof *one);
    return one->kind == other->kind && one->root == other->root;
}

/* The slots of those that have yet to publish `call`; if there are none, that of who leads it. */
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

/* Leads the call if that is this rank's to do and all parts are there. Nothing is visible before the
 * commit. */
static inline int board_lead(char *c, unsigned board, unsigned rank, uint64_t call) {
    shm_board *b = board_of(c, board);
    uint32_t epoch = LOAD(&b->epoch);
    uint64_t alive = LOAD(&b->alive), joining = LOAD(&b->joining), mask = 0, changes[MEMBERS];
    const void *sources[MEMBERS];
    unsigned n = 0;
    if (epoch & 1)
        return TURN_WAIT; /* the node is changing the membership, and wakes us when it has */
    /* An earlier leader commits before the membership that ends its lead can change. */
    if (LOAD(&b->result_call) > call)
        return TURN_AGAIN;
    for (uint64_t rest = alive | joining; rest; rest &= rest - 1) {
        unsigned other = (unsigned)__builtin_ctzll(rest);
        shm_member *m = &b->members[other];
        if (!takes_part(m, call))
            continue;
        if (!mask && other != rank)
            return TURN_WAIT; /* another one leads */
        if (LOAD(&m->seq) < call + 1)
            return TURN_WAIT;
        mask |= 1ULL << other;
    }
    if (!(mask >> rank & 1))
        return TURN_WAIT;
    if (LOAD(&b->epoch) != epoch)
        return TURN_AGAIN;
    if (mask & joining)
        return TURN_OTHER; /* they are to be let in by the node */
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

/* What there is to do about a call that this rank has published: one look. */
static inline int board_turn(char *c, unsigned board, unsigned rank, uint64_t call) {
    shm_board *b = board_of(c, board);
    if (LOAD(&b->result_call) > call)
        return LOAD(&b->result_id) ? TURN_OTHER : TURN_OVER;
    return board_lead(c, board, rank, call);
}

/* Until the call is over, or not for this file, or the time is over (TURN_WAIT: also when a signal
 * has come, or the node has gone). It spins once, for spin_us_max in all, and only if there is a
 * core for each that it waits for, beside those that spin. */
static inline int board_wait(char *c, unsigned board, unsigned slot, unsigned rank, uint64_t call,
                             uint64_t deadline) {
    shm_client *me = client_of(c, slot);
    uint64_t spin_until = 0, now, busy[MASK_WORDS];
    int turn, spinning = 0;
    for (;;) {
        uint32_t seen = LOAD(&me->event);
        turn = board_turn(c, board, rank, call);
        if (turn == TURN_AGAIN && now_ns() < deadline)
            continue; /* a rank that stands still while it writes is waited for elsewhere */
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
