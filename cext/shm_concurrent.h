/* Concurrent async tasks in one worker: which tasks it may take, and how it waits for one.
 *
 * A worker whose async tasks all wait at an await has time for more of them, but a plain task needs
 * its own worker. So such a worker reads a task's record before it takes the hint, and leaves
 * unsuitable hints at the head of the queue.
 */
#ifndef HOPLITE_SHM_BESIDE_H
#define HOPLITE_SHM_BESIDE_H

#include "shm_tasks.h"
#include "shm_trace.h"

/* Whether a worker with this many async tasks, for that output_owner, may also run this one. The
 * record is complete, because the header was seen QUEUED; the claim decides whether it still is. */
static inline int fits_concurrent(char *c, uint64_t id, unsigned running, uint64_t output_owner) {
    shm_record *r = record_of(c, id);
    uint64_t w = LOAD(&header_of(c, id)->word);
    if (WORD_GENERATION(w) != ID_GENERATION(id) || WORD_STATE(w) != ST_QUEUED)
        return 1; /* a stale hint: it is taken, and the claim fails */
    return (LOAD(&r->flags) & RECORD_ASYNC) && LOAD(&r->concurrency) > running &&
           LOAD(&r->output_owner) == output_owner;
}
/* The tasks that a worker with async tasks accepts from a bag. */
typedef struct {
    unsigned running;
    uint64_t output_owner;
} concurrent_fit;
static inline int hint_fits_concurrent(char *c, uint64_t id, const void *of) {
    const concurrent_fit *fit = of;
    return fits_concurrent(c, id, fit->running, fit->output_owner);
}
static inline uint64_t take_concurrent_rings(char *c, unsigned pool, unsigned slot, unsigned running,
                                         uint64_t output_owner, int any) {
    unsigned queues = LOAD(&root_of(c)->queues_high);
    for (unsigned number = 0; number < queues; number++) {
        shm_queue *q = queue_of(c, number);
        if (!LOAD(&q->owner) || LOAD(&q->pool) != pool || LOAD(&q->bag))
            continue;
        for (;;) {
            uint64_t head = LOAD(&q->head), tail = LOAD(&q->tail);
            if (head >= tail || LOAD(&q->pool) != pool)
                break;
            uint64_t id = LOAD(&q->ring[head % RING]);
            if (!any && id_valid(id) && !fits_concurrent(c, id, running, output_owner))
                break;
            if (!CAS64(&q->head, head, head + 1))
                continue;
            if (id_valid(id) && task_claim(c, id, slot))
                return id;
        }
    }
    return 0;
}
/* `any`: takes every task of that pool, which is an actor's. */
static inline uint64_t take_concurrent(char *c, unsigned pool, unsigned slot, unsigned running,
                                   uint64_t output_owner, int any) {
    unsigned queues = LOAD(&root_of(c)->queues_high);
    int ranked = LOAD(&pool_of(c, pool)->ranked) != 0 && !any;
    bag_filter filter = {hint_fits_concurrent, &(concurrent_fit){running, output_owner}};
    uint64_t id = ranked ? bag_take(c, pool, slot, queues, 1, &filter) : 0;
    if (!id)
        id = take_concurrent_rings(c, pool, slot, running, output_owner, any);
    return id || !ranked ? id : bag_take(c, pool, slot, queues, INT32_MIN, &filter);
}
/* Waits for one until the deadline, or until the task word differs from `seen`, which the caller
 * has read before it checked for ended tasks. 0: none. Its bit is not among the idle ones: a hint
 * that it cannot take must not be withheld from a worker that can. */
static inline uint64_t next_concurrent(char *c, unsigned pool, unsigned slot, unsigned running,
                                   uint64_t output_owner, int any, uint32_t seen,
                                   uint64_t deadline) {
    shm_client *me = client_of(c, slot);
    shm_pool *p = pool_of(c, pool);
    uint64_t bit = 1ULL << (slot % 64), now;
    OR(&p->concurrent[slot / 64], bit);
    uint64_t id = take_concurrent(c, pool, slot, running, output_owner, any);
    now = now_ns();
    if (!id && now < deadline && !LOAD(&root_of(c)->closing)) {
        uint64_t left = deadline - now;
        futex_wait(&me->task, seen, (int64_t)(left < SLICE_NS ? left : SLICE_NS));
    }
    AND(&p->concurrent[slot / 64], ~bit);
    return id ? id : take_concurrent(c, pool, slot, running, output_owner, any);
}

/* A concurrent task begins: none is inside another. */
static inline void trace_push_concurrent(char *c, unsigned slot, uint64_t id, const char *name,
                                     uint64_t now) {
    shm_trace *t = trace_of(c, slot);
    trace_push(c, slot, id, name, now);
    if (t->depth && t->depth <= TRACE_OPEN)
        t->open[t->depth - 1].depth = 1;
}
/* A concurrent task ends, wherever it is in the list. */
static inline void trace_remove(char *c, unsigned slot, uint64_t id, unsigned outcome) {
    shm_trace *t = trace_of(c, slot);
    uint32_t depth = t->depth, known = depth < TRACE_OPEN ? depth : TRACE_OPEN, at = known;
    for (uint32_t i = 0; i < known; i++)
        if (t->open[i].id == id)
            at = i;
    if (at < known && tracing(c)) {
        shm_event event = t->open[at];
        event.end_ns = now_ns();
        event.outcome = (uint8_t)outcome;
        event.bytes_out = result_bytes(c, id);
        trace_add(c, slot, &event);
    }
    trace_change(t);
    if (at < known)
        memmove(&t->open[at], &t->open[at + 1], (known - at - 1) * sizeof(shm_event));
    if (depth)
        t->depth = depth - 1;
    trace_changed(t);
}
#endif
