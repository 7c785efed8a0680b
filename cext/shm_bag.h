/* Bags: ranked hints; the highest is taken first.
 *
 * A ring keeps the order of submission. A priority is another order, and a task with resources
 * should not wait behind tasks without. A bag is in the memory of a queue. It has one producer,
 * which writes an entry and then its id; consumers read all entries and remove the id of the best
 * one by a CAS. As in a ring, a hint may be lost, duplicated or stale, and the claim decides. Pools
 * without a bag never use this file.
 *
 *   level > 0 │ ring: sent by workers │ level 0 │ ring: sent by others │ level < 0
 */
#ifndef HOPLITE_SHM_BAG_H
#define HOPLITE_SHM_BAG_H

#include "shm_object.h"

/* Kept out of the loops in which workers search for unranked tasks. */
#define SELDOM __attribute__((noinline, cold, unused))

static inline int task_claim(char *c, uint64_t id, unsigned slot) {
    return change_state(c, id, ST_QUEUED, ST_CLAIMED, -1, (int)slot);
}
static inline shm_hint *hints_of(shm_queue *q) { return (shm_hint *)q->ring; }

/* A task has at least the level of the task that sent it, which may be waiting for it. Otherwise
 * stand-ins could take one outer task after the other until all of them wait. */
static inline int32_t record_level(const shm_record *r) {
    return r->priority > r->floor ? r->priority : r->floor;
}
/* Among tasks of one level: first tasks sent by tasks, then tasks with resources, which no other
 * task can use meanwhile. */
static inline uint32_t hint_nearness(shm_record *r) {
    if (r->floor != FLOOR_NONE)
        return 2;
    return LOAD(&r->flags) & RECORD_RESOURCES ? 1 : 0;
}
static inline int hint_before(const shm_hint *a, const shm_hint *b, int same_bag) {
    if (a->level != b->level)
        return a->level > b->level;
    if (a->nearness != b->nearness)
        return a->nearness > b->nearness;
    if (a->priority != b->priority)
        return a->priority > b->priority;
    return same_bag && (int32_t)(a->order - b->order) < 0;
}
/* By the producer, before its first post. */
static inline void bag_open(char *c, unsigned queue, unsigned pool) {
    shm_queue *q = queue_of(c, queue);
    for (unsigned i = 0; i < BAG; i++)
        STORE(&hints_of(q)[i].id, 0);
    STORE(&q->bag_high, 0);
    STORE(&q->bag, 1);
    STORE(&pool_of(c, pool)->ranked, 1);
}
/* For the one producer. Returns the number of hints afterwards; 0: the bag was full. */
SELDOM static unsigned bag_add(char *c, unsigned queue, uint64_t id) {
    shm_queue *q = queue_of(c, queue);
    shm_record *r = record_of(c, id);
    unsigned high = q->bag_high, used = 0, count = 0, at = BAG;
    for (unsigned i = 0; i < high; i++) {
        if (LOAD(&hints_of(q)[i].id)) {
            used = i + 1;
            count++;
        } else if (at == BAG)
            at = i;
    }
    if (at == BAG)
        at = high;
    if (at >= BAG)
        return 0;
    shm_hint *h = &hints_of(q)[at];
    STORE(&h->level, record_level(r));
    STORE(&h->priority, r->priority);
    STORE(&h->nearness, hint_nearness(r));
    STORE(&h->order, (uint32_t)q->tail);
    STORE(&q->tail, q->tail + 1);
    STORE(&h->id, id);
    STORE(&q->bag_high, used > at + 1 ? used : at + 1);
    return count + 1;
}
SELDOM static unsigned bag_count(shm_queue *q) {
    unsigned high = LOAD(&q->bag_high), count = 0;
    for (unsigned i = 0; i < high && i < BAG; i++)
        count += LOAD(&hints_of(q)[i].id) != 0;
    return count;
}
typedef struct {
    int (*fits)(char *, uint64_t, const void *);
    const void *of;
} bag_filter;

/* Claims the best hint of that pool whose level is at least `lowest`; 0: none. The scan sees the
 * bag as it was when the scan began: a consumer that is paused in the middle would otherwise find
 * later hints behind that place and miss earlier ones before it. */
SELDOM static uint64_t bag_take(char *c, unsigned pool, unsigned slot, unsigned queues,
                                int32_t lowest, const bag_filter *filter) {
    for (;;) {
        shm_hint best = {0}, *where = NULL;
        int too_new = 0;
        for (unsigned number = 0; number < queues; number++) {
            shm_queue *q = queue_of(c, number);
            if (!LOAD(&q->owner) || !LOAD(&q->bag) || LOAD(&q->pool) != pool ||
                (slot == NODE_SLOT && LOAD(&q->here)))
                continue;
            uint32_t begun = (uint32_t)LOAD(&q->tail);
            unsigned high = LOAD(&q->bag_high);
            int from_here = 0;
            for (unsigned i = 0; i < high && i < BAG; i++) {
                shm_hint *h = &hints_of(q)[i], found;
                if (!(found.id = LOAD(&h->id)))
                    continue;
                found.level = LOAD(&h->level);
                found.priority = LOAD(&h->priority);
                found.order = LOAD(&h->order);
                found.nearness = LOAD(&h->nearness);
                if (found.level < lowest)
                    continue;
                if ((int32_t)(found.order - begun) >= 0) {
                    too_new = 1;
                    continue;
                }
                if (where && !hint_before(&found, &best, from_here))
                    continue;
                if (filter && id_valid(found.id) && !filter->fits(c, found.id, filter->of))
                    continue;
                best = found;
                where = h;
                from_here = 1;
            }
        }
        if (!where && too_new) /* the next scan, which begins after their post, sees them */
            continue;
        if (!where)
            return 0;
        if (CAS64(&where->id, best.id, 0) && id_valid(best.id) && task_claim(c, best.id, slot))
            return best.id;
    }
}
/* Tasks of this pool for which its workers wait precede everything: whatever their level, a higher
 * one needs them. Not tasks with resources, whose wait begins at the node. */
SELDOM static uint64_t take_waited_for(char *c, unsigned pool, unsigned slot) {
    if (slot == NODE_SLOT)
        return 0;
    for (unsigned i = 0; i < CLIENTS; i++) {
        shm_client *w = client_of(c, i);
        if (!LOAD(&w->blocked) || LOAD(&w->pool) != pool)
            continue;
        uint64_t id = LOAD(&w->waiting_id);
        if (!id || !id_valid(id))
            continue;
        shm_header *h = header_of(c, id);
        if (LOAD(&h->kind) == KIND_TASK && LOAD(&h->pool) == pool &&
            WORD_STATE(LOAD(&h->word)) == ST_QUEUED &&
            !(LOAD(&record_of(c, id)->flags) & RECORD_RESOURCES) && task_claim(c, id, slot))
            return id;
    }
    return 0;
}
#endif
