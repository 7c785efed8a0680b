/* A client's running tasks and, during a trace, its past events: a stack and a ring for each.
 *
 * A timeline must not cost a task a system call, nor be lost with its worker. The client writes 80
 * bytes into its own memory; its node reads them at any time, also after the client's death. One
 * writer, one reader; events that the reader misses are counted.
 */
#ifndef HOPLITE_SHM_TRACE_H
#define HOPLITE_SHM_TRACE_H

#include "shm_object.h"

enum {
    TRACE_WAKE = TRACE_RING / 4, /* events after which the node is notified */
    TRACE_TRIES = 1000,          /* reads of a changing stack; a task takes longer than a read */
};

#define PUT(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

static inline int tracing(char *c) { return LOAD(&root_of(c)->tracing) != 0; }

/* The fence keeps the changes from being visible before the odd count. */
static inline void trace_change(shm_trace *t) {
    PUT(&t->changes, t->changes + 1);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
static inline void trace_changed(shm_trace *t) { PUT(&t->changes, t->changes + 1); }

/* Bytes of a task's arguments. The record is that of a task that its runner has claimed. */
static inline uint64_t arguments_bytes(char *c, uint64_t id) {
    shm_record *r = record_of(c, id);
    return r->args ? header_of(c, r->args)->size : r->args_len;
}
/* Bytes of a task's result; 0 if the header has another generation by now. */
static inline uint64_t result_bytes(char *c, uint64_t id) {
    shm_header *h = header_of(c, id);
    if (WORD_GENERATION(LOAD(&h->word)) != ID_GENERATION(id))
        return 0;
    return h->flags & FLAG_INLINE ? record_of(c, id)->result_len : h->size;
}

/* A task begins. Always written, because finding the running tasks later would cost more. */
static inline void trace_push(char *c, unsigned slot, uint64_t id, const char *name, uint64_t now) {
    shm_trace *t = trace_of(c, slot);
    uint32_t depth = t->depth;
    trace_change(t);
    if (depth < TRACE_OPEN) {
        shm_event *e = &t->open[depth];
        e->id = id;
        e->begin_ns = now;
        e->end_ns = 0;
        e->kind = EVENT_TASK;
        e->outcome = OUTCOME_RUNNING;
        e->depth = (uint16_t)(depth + 1);
        e->rank = 0;
        memcpy(e->name, name, NAME_BYTES);
        e->bytes_in = arguments_bytes(c, id);
        e->bytes_out = 0;
    }
    t->depth = depth + 1;
    trace_changed(t);
}
/* The event first, then the count: entries below `tail` are complete. */
static inline void trace_add(char *c, unsigned slot, const shm_event *event) {
    shm_trace *t = trace_of(c, slot);
    uint64_t tail = t->tail;
    t->ring[tail % TRACE_RING] = *event;
    PUT(&t->tail, tail + 1);
    if ((tail + 1) % TRACE_WAKE == 0)
        wake_node(c);
}
/* The latest task ends. First into the ring, then off the stack: a reader of the stack and then the
 * ring misses nothing, and recognises duplicates by id and beginning. */
static inline void trace_pop(char *c, unsigned slot, unsigned outcome) {
    shm_trace *t = trace_of(c, slot);
    uint32_t depth = t->depth;
    if (!depth)
        return;
    if (tracing(c) && depth <= TRACE_OPEN) {
        shm_event event = t->open[depth - 1];
        event.end_ns = now_ns();
        event.outcome = (uint8_t)outcome;
        event.bytes_out = result_bytes(c, event.id);
        trace_add(c, slot, &event);
    }
    trace_change(t);
    t->depth = depth - 1;
    trace_changed(t);
}

/* -- the node ------------------------------------------------------------------------------- */

/* Copies the client's running tasks; returns their number. */
static inline unsigned trace_copy_open(char *c, unsigned slot, shm_event *into) {
    shm_trace *t = trace_of(c, slot);
    unsigned depth = 0;
    for (int i = 0; i < TRACE_TRIES; i++) {
        uint32_t before = LOAD(&t->changes);
        depth = LOAD(&t->depth);
        if (depth > TRACE_OPEN)
            depth = TRACE_OPEN;
        memcpy(into, t->open, depth * sizeof(shm_event));
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        if (!(before & 1) && LOAD(&t->changes) == before)
            return depth;
        sched_yield();
    }
    return depth; /* its client was killed in between: entries below the last one are complete */
}
/* Moves the ring's events; returns their number, and adds the overwritten ones to *dropped. */
static inline unsigned trace_take(char *c, unsigned slot, shm_event *into, uint64_t *dropped) {
    shm_trace *t = trace_of(c, slot);
    uint64_t head = t->head, tail = LOAD(&t->tail), first = head, valid;
    if (tail - first > TRACE_RING)
        first = tail - TRACE_RING;
    for (uint64_t i = first; i < tail; i++)
        into[i - first] = t->ring[i % TRACE_RING];
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    /* Events overwritten meanwhile, or being overwritten, do not count. */
    valid = LOAD(&t->tail) + 1;
    valid = valid > TRACE_RING ? valid - TRACE_RING : 0;
    if (valid > first) {
        uint64_t gone = valid < tail ? valid - first : tail - first;
        memmove(into, into + gone, (tail - first - gone) * sizeof(shm_event));
        first += gone;
    }
    *dropped += first - head;
    t->head = tail;
    return (unsigned)(tail - first);
}
/* Another process now has the slot. */
static inline void trace_clear(char *c, unsigned slot) {
    shm_trace *t = trace_of(c, slot);
    t->depth = 0;
    t->changes = 0;
    t->head = t->tail;
}
#endif
