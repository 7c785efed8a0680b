/* Holders and states of a header: acquire, release, try free, pin, seal, collect, return a block.
 *
 * These functions are the transitions of docs/architecture.md ("States of a header", "Holders",
 * "Blocks and spans"). Each is safe if the caller is killed between any two instructions.
 * tests/model explores the same steps.
 */
#ifndef HOPLITE_SHM_OBJECT_H
#define HOPLITE_SHM_OBJECT_H

#include "shm_layout.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* For a simulation, which runs the processes of many hosts in one process, one at a time, in
 * virtual time: replaces the clock and futexes. NULL in production. Each compiled module has its
 * own (shm_play.pxi). */
typedef struct {
    uint64_t now_ns;
    void (*sleep)(uint32_t *word, int64_t ns);
    void (*wake)(uint32_t *word);
} shm_play;
static shm_play *played;

static inline uint64_t now_ns(void) {
    if (__builtin_expect(played != NULL, 0))
        return played->now_ns++; /* as in real time, no two calls return the same time */
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ULL + (uint64_t)t.tv_nsec;
}
static inline uint32_t now_stamp(void) {
    if (__builtin_expect(played != NULL, 0))
        return (uint32_t)(played->now_ns / 15625000);
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (uint32_t)((uint64_t)t.tv_sec * 64 + (uint64_t)t.tv_nsec / 15625000);
}
static inline void futex_wake(uint32_t *word) {
    if (__builtin_expect(played != NULL, 0)) {
        played->wake(word);
        return;
    }
    syscall(SYS_futex, word, FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0);
}
static inline int futex_wait(uint32_t *word, uint32_t value, int64_t ns) {
    if (__builtin_expect(played != NULL, 0)) {
        if (LOAD(word) == value)
            played->sleep(word, ns);
        errno = EINTR; /* the waiter checks again */
        return -1;
    }
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    return (int)syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0);
}

/* This process's private data about a mapping: private memory just before the control memory, with
 * the size of the largest page of any machine. */
#define PRIVATE_BYTES 65536
typedef struct {
    int node_event;    /* eventfd of the node */
    dev_t event_dev;   /* what that number was when it was received: the program may close it and open */
    ino_t event_ino;   /* a file or socket of its own under it. (All eventfds have the same inode.) */
    uint32_t lost;     /* this process has seen the end of its node: nothing more will come */
} shm_private;
static inline shm_private *private_of(char *c) { return (shm_private *)(c - PRIVATE_BYTES); }

/* The node sleeps in epoll, not on a futex: an eventfd, written only while it sleeps. */
static inline void wake_node(char *c) {
    shm_client *n = client_of(c, NODE_SLOT);
    if (LOAD(&n->sleeping)) {
        const shm_private *own = private_of(c);
        struct stat is;
        uint64_t one = 1;
        if (!fstat(own->node_event, &is) && is.st_dev == own->event_dev &&
            is.st_ino == own->event_ino) {
            ssize_t ignored = write(own->node_event, &one, 8);
            (void)ignored;
        }
    }
}
static inline void set_node_event(char *c, int fd) {
    shm_private *own = private_of(c);
    struct stat is;
    own->node_event = fd;
    if (fstat(fd, &is))
        memset(&is, 0, sizeof is);
    own->event_dev = is.st_dev;
    own->event_ino = is.st_ino;
}

/* Wakes every waiting thread of a client: changes the event first, then reads the count of sleepers
 * (a waiter does the opposite), so that no wake-up is lost between a waiter's last check and its
 * sleep. Only the waiter changes that count: a waker that reset it could hide a second waiter. */
static inline void wake_client(char *c, unsigned slot) {
    shm_client *w = client_of(c, slot);
    ADD(&w->event, 1);
    if (slot == NODE_SLOT)
        wake_node(c);
    else if (LOAD(&w->sleeping))
        futex_wake(&w->event);
}
static inline unsigned park_index(uint64_t id) {
    uint64_t h = (id ^ (id >> 29)) * 0x9E3779B97F4A7C15ULL;
    return (unsigned)(h >> 56) % PARKS;
}
/* Also records the bucket: a waiter for many objects checks only those in it. */
static inline void wake_parked(char *c, uint64_t id) {
    unsigned bucket = park_index(id);
    uint64_t *park = park_of(c, bucket);
    for (int i = 0; i < MASK_WORDS; i++) {
        uint64_t mask = LOAD(&park[i]);
        while (mask) {
            unsigned bit = (unsigned)__builtin_ctzll(mask);
            mask &= mask - 1;
            OR(&client_of(c, (unsigned)i * 64 + bit)->parked_news[bucket / 64],
               1ULL << (bucket % 64));
            wake_client(c, (unsigned)i * 64 + bit);
        }
    }
}

static inline int state_done(unsigned s) { return s >= ST_ABORTED && s <= ST_SPILLED; }
static inline int state_can_free(unsigned s) {
    return s == ST_SEALED || s == ST_FAILED || s == ST_CANCELLED || s == ST_DELETED ||
           s == ST_SPILLED;
}
static inline int mask_empty(uint64_t *m) {
    for (int i = 0; i < MASK_WORDS; i++)
        if (LOAD(&m[i]))
            return 0;
    return 1;
}
/* The node collects its own tables at once, because other hosts and actors wait for freed objects.
 * Other owners check at their next operation. */
static inline void set_freed_bit(char *c, uint64_t id) {
    shm_table *t = table_of(c, ID_TABLE(id));
    OR(&t->freed[ID_INDEX(id) / 64], 1ULL << (ID_INDEX(id) % 64));
    OR(&t->freed_summary, 1ULL << (ID_INDEX(id) / 64));
    if (LOAD(&root_of(c)->hungry) || LOAD(&t->owner) == NODE_SLOT + 1)
        wake_node(c);
}
static inline void set_done_bit(char *c, uint64_t id) {
    shm_table *t = table_of(c, ID_TABLE(id));
    OR(&t->done[ID_INDEX(id) / 64], 1ULL << (ID_INDEX(id) % 64));
    OR(&t->done_summary, 1ULL << (ID_INDEX(id) / 64));
}
/* After the header's step: its flags may already be another object's; then the bit is a false
 * alarm. */
static inline void set_gone_bit(char *c, uint64_t id) {
    unsigned t = ID_TABLE(id), i = ID_INDEX(id);
    OR(&table_of(c, t)->gone[i / 64], 1ULL << (i % 64));
    OR(&table_of(c, t)->gone_summary, 1ULL << (i / 64));
    OR(&root_of(c)->gone_tables[t / 64], 1ULL << (t % 64));
}
/* By the table's owner, before the header is visible as a task of that pool. */
static inline void note_pool(shm_table *t, unsigned index, unsigned pool) {
    uint64_t word = 1ULL << (index / 64), bit = 1ULL << (pool % 64);
    if (!(LOAD(&t->pool_groups[pool % 64]) & word))
        OR(&t->pool_groups[pool % 64], word);
    if (!(LOAD(&t->pools) & bit))
        OR(&t->pools, bit);
}
/* Likewise: none of these 64 headers is still a task. */
static inline void forget_pools(shm_table *t, unsigned word) {
    for (uint64_t pools = LOAD(&t->pools); pools; pools &= pools - 1)
        AND(&t->pool_groups[__builtin_ctzll(pools)], ~(1ULL << word));
}
static inline void set_pool(char *c, uint64_t id, unsigned pool) {
    note_pool(table_of(c, ID_TABLE(id)), ID_INDEX(id), pool);
    header_of(c, id)->pool = (uint16_t)pool;
}
/* The only place where a header becomes FREED. Returns 1 if this call did it. */
static inline int try_free(char *c, uint64_t id) {
    shm_header *h = header_of(c, id);
    for (;;) {
        uint64_t w = LOAD(&h->word);
        unsigned s = WORD_STATE(w);
        if (WORD_GENERATION(w) != ID_GENERATION(id) || !state_can_free(s))
            return 0;
        unsigned marked = LOAD(&h->flags) & FLAG_ELSEWHERE; /* a later mark changes the word */
        if (!mask_empty(h->pins))
            return 0;
        if (!mask_empty(h->refs)) {
            if (s == ST_DELETED && !(LOAD(&h->flags) & FLAG_RETURNED))
                set_freed_bit(c, id); /* the owner returns the bytes, and keeps the header */
            return 0;
        }
        if (CAS64(&h->word, w, (w & ~0xFULL) | ST_FREED)) {
            if (marked)
                set_gone_bit(c, id);
            set_freed_bit(c, id);
            return 1;
        }
    }
}

/* Sets the holder's bit, then counts. The word returned by that count decides. */
static inline unsigned acquire_bit(char *c, uint64_t id, unsigned slot, int pin, uint64_t *word) {
    shm_header *h = header_of(c, id);
    uint64_t *mask = pin ? h->pins : h->refs;
    OR(&mask[slot / 64], 1ULL << (slot % 64));
    uint64_t w = ADD(&h->word, WORD_ACQUIRE_ONE);
    *word = w;
    return WORD_GENERATION(w) == ID_GENERATION(id) ? WORD_STATE(w) : ST_FREE;
}
/* Clears a holder's bit. A stale id's bit may have been set on a newer object, so the free is tried
 * for the present generation. */
static inline void release_bit(char *c, uint64_t id, unsigned slot, int pin) {
    shm_header *h = header_of(c, id);
    uint64_t *mask = pin ? h->pins : h->refs;
    AND(&mask[slot / 64], ~(1ULL << (slot % 64)));
    uint64_t w = LOAD(&h->word);
    try_free(c, ID_MAKE(ID_TABLE(id), ID_INDEX(id), WORD_GENERATION(w)));
    unsigned kind = LOAD(&h->kind);
    if ((!pin && kind == KIND_STREAM) || kind == KIND_LENT) { /* its maker continues, or stops */
        uint32_t owner = LOAD(&table_of(c, ID_TABLE(id))->owner);
        if (owner)
            wake_client(c, owner - 1);
    }
}

/* CAS of the state, at any acquires count. Returns 1 on success. */
static inline int change_state(char *c, uint64_t id, unsigned from, unsigned to, int claimant,
                               int new_claimant) {
    shm_header *h = header_of(c, id);
    for (;;) {
        uint64_t w = LOAD(&h->word);
        if (WORD_GENERATION(w) != ID_GENERATION(id) || WORD_STATE(w) != from)
            return 0;
        if (claimant >= 0 && WORD_CLAIMANT(w) != (unsigned)claimant)
            return 0;
        uint64_t n = (w & ~0xFULL) | to;
        if (new_claimant >= 0)
            n = (n & ~0xFF0ULL) | ((uint64_t)new_claimant << 4);
        if (from == ST_QUEUED && to == ST_CLAIMED)
            n = (n & ~0xFF000ULL) | ((uint64_t)((WORD_ATTEMPT(w) + 1) & 0xFF) << 12);
        if (CAS64(&h->word, w, n))
            return 1;
    }
}

/* Makes all waiters of this id check again: its owner (which also finds it in `done`), parked. */
static inline void wake_waiters(char *c, uint64_t id) {
    set_done_bit(c, id);
    uint32_t owner = LOAD(&table_of(c, ID_TABLE(id))->owner);
    if (owner)
        wake_client(c, owner - 1);
    wake_parked(c, id);
}
static inline void announce_done(char *c, uint64_t id) {
    AND(&table_of(c, ID_TABLE(id))->open[ID_INDEX(id) / 64], ~(1ULL << (ID_INDEX(id) % 64)));
    wake_waiters(c, id);
}
/* CLAIMED(slot) -> SEALED or FAILED; otherwise settles an abort. Returns 1 if the result counts. */
static inline int finish(char *c, uint64_t id, unsigned slot, unsigned to) {
    if (change_state(c, id, ST_CLAIMED, to, (int)slot, -1)) {
        announce_done(c, id);
        try_free(c, id);
        return 1;
    }
    return 0;
}
static inline int settle_abort(char *c, uint64_t id, unsigned slot) {
    unsigned to = LOAD(&header_of(c, id)->flags) & FLAG_ABORT_DELETE ? ST_DELETED : ST_CANCELLED;
    if (!change_state(c, id, ST_ABORTED, to, (int)slot, -1))
        return 0;
    announce_done(c, id);
    try_free(c, id);
    return 1;
}

/* 1: deleted; 0: nothing to delete; -1: the node is moving the bytes, call again. */
static inline int delete_object(char *c, uint64_t id) {
    shm_header *h = header_of(c, id);
    for (;;) {
        uint64_t w = LOAD(&h->word);
        if (WORD_GENERATION(w) != ID_GENERATION(id))
            return 0;
        unsigned s = WORD_STATE(w), to;
        if (s == ST_WAITING || s == ST_QUEUED || s == ST_SEALED || s == ST_SPILLED)
            to = ST_DELETED;
        else if (s == ST_CLAIMED) {
            OR(&h->flags, FLAG_ABORT_DELETE);
            to = ST_ABORTED;
        } else
            return s == ST_SPILLING ? -1 : 0;
        unsigned marked = LOAD(&h->flags) & FLAG_ELSEWHERE;
        if (CAS64(&h->word, w, (w & ~0xFULL) | to)) {
            if (marked)
                set_gone_bit(c, id);
            announce_done(c, id);
            try_free(c, id);
            return 1;
        }
    }
}
static inline shm_block *block_of(char *store, uint64_t payload) {
    return (shm_block *)(store + payload - BLOCK_ALIGN);
}
/* SEALED -> DELETED if only this client has pinned it: its block is leased again, and may be
 * written. Later readers find it deleted. A concurrent pin increments acquires, so it is detected.
 * If the client is killed in between, the block is freed with the object or the lease. Returns 1;
 * 0: it has readers; -1: it is no longer such an object. */
static inline int take_back(char *c, char *store, uint64_t id, unsigned slot) {
    shm_header *h = header_of(c, id);
    for (;;) {
        uint64_t w = LOAD(&h->word);
        unsigned s = WORD_STATE(w);
        if (WORD_GENERATION(w) != ID_GENERATION(id) || (s != ST_SEALED && s != ST_SPILLING))
            return -1;
        for (unsigned i = 0; i < MASK_WORDS; i++)
            if (LOAD(&h->pins[i]) & ~(i == slot / 64 ? 1ULL << (slot % 64) : 0))
                return 0;
        if (s == ST_SPILLING)
            return 0; /* the node is about to see this client's pin */
        unsigned marked = LOAD(&h->flags) & FLAG_ELSEWHERE;
        if (CAS64(&h->word, w, (w & ~0xFULL) | ST_DELETED)) {
            CAS64(&block_of(store, h->block)->owner, id, BLOCK_LEASED);
            OR(&h->flags, FLAG_RETURNED);
            if (marked)
                set_gone_bit(c, id);
            return 1;
        }
    }
}
/* WAITING or QUEUED -> CANCELLED; with force CLAIMED -> ABORTED. 0 = too late, 2 = was running. */
static inline int cancel_task(char *c, uint64_t id, int force) {
    for (int s = ST_WAITING; s <= ST_QUEUED; s++)
        if (change_state(c, id, (unsigned)s, ST_CANCELLED, -1, -1)) {
            announce_done(c, id);
            try_free(c, id);
            return 1;
        }
    if (force && change_state(c, id, ST_CLAIMED, ST_ABORTED, -1, -1)) {
        announce_done(c, id);
        return 2;
    }
    return 0;
}

/* Returns the bytes to their lessee. Idempotent, because the owner word must still name the object.
 * Returns 1 if this call did it. */
static inline int return_block(char *c, char *store, uint64_t payload, uint64_t owner) {
    shm_block *b = block_of(store, payload);
    uint32_t big = LOAD(&b->big), lessee = LOAD(&b->lessee); /* after the CAS they are another's */
    if (!CAS64(&b->owner, owner, 0))
        return 0;
    if (big) {
        uint64_t at = ADD(&root_of(c)->returns_next, 1);
        STORE(&root_of(c)->returns[at % RETURNS], payload | RETURN_LAP(at));
        if (LOAD(&root_of(c)->hungry))
            wake_node(c);
    } else {
        assert(lessee < CLIENTS);
        STORE(&client_of(c, lessee)->returned, 1);
    }
    return 1;
}
#endif
