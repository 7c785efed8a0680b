/* Cleanup by the node after a client's death, and reclaiming when memory is short.
 *
 * A dead client cannot clean up. Each function may be repeated; none trusts data that the dead
 * client was writing.
 */
#ifndef HOPLITE_SHM_SWEEP_H
#define HOPLITE_SHM_SWEEP_H

#include "shm_tasks.h"

/* Clears every bit of a dead client: holders, parking, idle, spinners. `pins` 0: it has left the
 * host but its process lives, and its pins are still read there. Then checks every header, not only
 * those that it held: it may have died between clearing its bit and freeing, or between freeing and
 * reporting it. For the same reason every lessee checks for returned blocks, and all clients wake
 * up once. */
static inline void sweep_bits(char *c, unsigned slot, int pins) {
    uint64_t keep = ~(1ULL << (slot % 64));
    unsigned word = slot / 64;
    for (unsigned i = 0; i < PARKS; i++)
        AND(&park_of(c, i)[word], keep);
    for (unsigned i = 0; i < POOLS; i++) {
        AND(&pool_of(c, i)->idle[word], keep);
        AND(&pool_of(c, i)->spinning[word], keep);
        AND(&pool_of(c, i)->concurrent[word], keep);
    }
    AND(&root_of(c)->spinners[word], keep);
    CAS32(&root_of(c)->file_writer, slot + 1, 0);
    unsigned tables = LOAD(&root_of(c)->tables_high);
    for (unsigned t = 0; t < tables; t++) {
        unsigned high = LOAD(&table_of(c, t)->high);
        for (unsigned i = 0; i < high; i++) {
            shm_header *h = header_at(c, t, i);
            if (LOAD(&h->refs[word]) & ~keep)
                AND(&h->refs[word], keep);
            if (pins && LOAD(&h->pins[word]) & ~keep)
                AND(&h->pins[word], keep);
            uint64_t w = LOAD(&h->word), id = ID_MAKE(t, i, WORD_GENERATION(w));
            if ((WORD_STATE(w) == ST_FREED || WORD_STATE(w) == ST_DELETED) &&
                LOAD(&h->flags) & FLAG_ELSEWHERE)
                set_gone_bit(c, id);
            if (WORD_STATE(w) == ST_FREED)
                set_freed_bit(c, id);
            else
                try_free(c, id);
        }
    }
    for (unsigned i = 0; i < CLIENTS; i++)
        if (LOAD(&client_of(c, i)->state)) {
            /* it may have died before it recorded which */
            for (unsigned k = 0; k < PARKS / 64; k++)
                STORE(&client_of(c, i)->parked_news[k], ~0ULL);
            if (i == NODE_SLOT)
                continue;
            STORE(&client_of(c, i)->returned, 1);
            wake_client(c, i);
        }
}
/* Queues and tables of a dead client: frees the queues; the node adopts the tables. */
static inline void sweep_ownership(char *c, unsigned slot) {
    unsigned queues = LOAD(&root_of(c)->queues_high);
    for (unsigned q = 0; q < queues; q++)
        if (LOAD(&queue_of(c, q)->owner) == slot + 1)
            queue_close(c, q);
    unsigned tables = LOAD(&root_of(c)->tables_high);
    for (unsigned t = 0; t < tables; t++)
        if (LOAD(&table_of(c, t)->owner) == slot + 1)
            STORE(&table_of(c, t)->owner, NODE_SLOT + 1);
}
/* A payload offset of a live header whose block points back; otherwise 0. */
static inline uint64_t live_block(char *c, char *store, unsigned t, unsigned i, uint64_t *id) {
    shm_header *h = header_at(c, t, i);
    uint64_t w = LOAD(&h->word), at = LOAD(&h->block);
    unsigned s = WORD_STATE(w);
    *id = ID_MAKE(t, i, WORD_GENERATION(w));
    if (s == ST_FREE || !at || (LOAD(&h->flags) & (FLAG_INLINE | FLAG_RETURNED)))
        return 0;
    if (s == ST_WAITING || s == ST_QUEUED || s == ST_CANCELLED || s == ST_SPILLED)
        return 0;
    /* An uncollected header may name bytes that now belong to another object. */
    return LOAD(&block_of(store, at)->owner) == *id ? at : 0;
}
#endif
