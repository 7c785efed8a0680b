/* Hints, claims and waits: how tasks find workers, and results find their waiters.
 *
 * A task costs a few hundred nanoseconds here, or a system call. A hint may be lost, duplicated or
 * stale; the claim, one CAS on the header's word, decides.
 */
#ifndef HOPLITE_SHM_TASKS_H
#define HOPLITE_SHM_TASKS_H

#include "shm_bag.h"

#include <errno.h>

enum { SLICE_NS = 500000000, BURST_PAUSES = 16, POLITE_BURSTS = 4 };
enum wait_result {
    WAIT_TIMEOUT = 0, WAIT_DONE = 1, WAIT_AGAIN = 2, WAIT_NEWS = 3, WAIT_CLOSING = 4,
};

#define NODE_BIT (1ULL << NODE_SLOT)
_Static_assert(NODE_SLOT < 64, "the node's bit is in the first word of a mask");

static inline void pause_burst(void) {
    for (int i = 0; i < BURST_PAUSES; i++)
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#else
        __asm__ __volatile__("" ::: "memory");
#endif
    sched_yield();
}
/* At most cores - 1 processes spin at one time. `busy`: clients that need a core, as far as the
 * waiter knows; with them, spinning needs at most all cores. NULL: one unknown client. */
static inline int spin_begin(char *c, unsigned slot, const uint64_t *busy) {
    shm_root *r = root_of(c);
    unsigned n = busy ? 0 : 1;
    for (unsigned i = 0; i < MASK_WORDS; i++) {
        uint64_t mask = LOAD(&r->spinners[i]) | (busy ? busy[i] : 0);
        if (i == slot / 64)
            mask |= 1ULL << (slot % 64);
        n += (unsigned)__builtin_popcountll(mask);
    }
    if (n > r->cores)
        return 0;
    OR(&r->spinners[slot / 64], 1ULL << (slot % 64));
    return 1;
}
static inline void spin_end(char *c, unsigned slot) {
    AND(&root_of(c)->spinners[slot / 64], ~(1ULL << (slot % 64)));
}

/* -- queues ------------------------------------------------------------------------------- */

/* Workers of a pool that sleep or spin until there is a task. */
static inline unsigned pool_idle(char *c, unsigned pool) {
    shm_pool *p = pool_of(c, pool);
    unsigned count = 0;
    for (int i = 0; i < MASK_WORDS; i++)
        count += (unsigned)__builtin_popcountll((LOAD(&p->idle[i]) | LOAD(&p->spinning[i])) &
                                                (i ? ~0ULL : ~NODE_BIT));
    return count;
}

/* Wakes a worker that sleeps until there is a task. */
static inline void wake_for_task(char *c, unsigned slot) {
    shm_client *w = client_of(c, slot);
    ADD(&w->task, 1);
    futex_wake(&w->task);
}
static inline void wake_worker(char *c, unsigned pool, uint64_t hints) {
    shm_pool *p = pool_of(c, pool);
    unsigned spinning = 0;
    for (int i = 0; i < MASK_WORDS; i++)
        spinning += (unsigned)__builtin_popcountll(LOAD(&p->spinning[i]));
    if (hints <= spinning)
        return; /* a spinning worker checks the queues once more before it sleeps */
    for (int i = 0; i < MASK_WORDS; i++) {
        uint64_t mask;
        while ((mask = LOAD(&p->idle[i]) & (i ? ~0ULL : ~NODE_BIT))) {
            unsigned bit = (unsigned)__builtin_ctzll(mask);
            if (!(AND(&p->idle[i], ~(1ULL << bit)) & (1ULL << bit)))
                continue; /* another process wakes that one */
            wake_for_task(c, (unsigned)i * 64 + bit);
            return;
        }
    }
    /* Workers with async tasks and free capacity: only they can tell whether the hint suits. */
    for (int i = 0; i < MASK_WORDS; i++) {
        uint64_t mask = LOAD(&p->concurrent[i]);
        for (; mask; mask &= mask - 1)
            wake_for_task(c, (unsigned)i * 64 + (unsigned)__builtin_ctzll(mask));
    }
    /* The node last: it takes tasks for workers of other hosts. */
    if (LOAD(&p->idle[0]) & NODE_BIT && AND(&p->idle[0], ~NODE_BIT) & NODE_BIT)
        wake_node(c);
}
/* One producer. Returns 0 when the ring is full. */
static inline int queue_post(char *c, unsigned queue, uint64_t id) {
    shm_queue *q = queue_of(c, queue);
    uint64_t tail = q->tail, head = LOAD(&q->head);
    if (tail - head >= RING)
        return 0;
    STORE(&q->ring[tail % RING], id);
    STORE(&q->tail, tail + 1);
    wake_worker(c, q->pool, tail + 1 - head);
    return 1;
}
/* The same for a ranked task, into a bag. */
static inline int queue_post_ranked(char *c, unsigned queue, uint64_t id) {
    unsigned hints = bag_add(c, queue, id);
    if (hints)
        wake_worker(c, queue_of(c, queue)->pool, hints);
    return hints != 0;
}
/* Drops the remaining hints. The counts continue: if they were reset, they could equal those that a
 * consumer has read, and its CAS would take another's hint. */
static inline void queue_close(char *c, unsigned queue) {
    shm_queue *q = queue_of(c, queue);
    STORE(&q->head, LOAD(&q->tail));
    STORE(&q->bag, 0);
    STORE(&q->owner, 0);
}
/* By a client that finds it free. Sets the number of queues first: later queues are never swept. */
static inline int queue_open(char *c, unsigned queue, unsigned slot, unsigned pool, int here) {
    shm_queue *q = queue_of(c, queue);
    uint32_t high;
    while ((high = LOAD(&root_of(c)->queues_high)) < queue + 1)
        CAS32(&root_of(c)->queues_high, high, queue + 1);
    if (LOAD(&q->owner) || !CAS32(&q->owner, 0, slot + 1))
        return 0;
    STORE(&q->pool, pool);
    STORE(&q->here, (uint32_t)here);
    return 1;
}
/* Of the hints of workers (nested) or of others: claims the first possible one. 0: none. */
static inline uint64_t queue_take_some(char *c, unsigned pool, unsigned slot, unsigned *start,
                                       unsigned queues, int nested) {
    for (unsigned k = 0; k < queues; k++) {
        unsigned number = (*start + k) % queues;
        shm_queue *q = queue_of(c, number);
        uint32_t owner = LOAD(&q->owner);
        if (!owner || LOAD(&q->pool) != pool || (slot == NODE_SLOT && LOAD(&q->here)) ||
            LOAD(&q->bag) ||
            (LOAD(&client_of(c, owner - 1)->kind) == CLIENT_WORKER) != nested)
            continue;
        for (;;) {
            uint64_t head = LOAD(&q->head), tail = LOAD(&q->tail);
            if (head >= tail || LOAD(&q->pool) != pool) /* it may be another pool's by now */
                break;
            uint64_t id = LOAD(&q->ring[head % RING]);
            if (!CAS64(&q->head, head, head + 1))
                continue;
            if (id_valid(id) && task_claim(c, id, slot)) {
                *start = (number + 1) % queues;
                return id;
            }
        }
    }
    return 0;
}
/* The number of regular workers that wait inside tasks, and of other stand-ins that may begin
 * tasks. */
typedef struct {
    unsigned waiting, others;
} stand_in_counts;
static inline int is_worker_of(char *c, unsigned pool, unsigned slot) {
    shm_client *w = client_of(c, slot);
    return LOAD(&w->state) == CLIENT_LIVE && LOAD(&w->kind) == CLIENT_WORKER &&
           LOAD(&w->pool) == pool && !(LOAD(&w->retire) & RETIRE_ENDS);
}
/* `slot`: the requesting stand-in; `others` then counts only stand-ins that run a task or are in
 * lower slots. CLIENTS: counts all. */
SELDOM static stand_in_counts count_stand_ins(char *c, unsigned pool, unsigned slot) {
    stand_in_counts found = {0, 0};
    for (unsigned i = 0; i < CLIENTS; i++) {
        shm_client *w = client_of(c, i);
        if (i == slot || !is_worker_of(c, pool, i))
            continue;
        if (LOAD(&w->stands_in) == STANDS_NOT)
            found.waiting += LOAD(&w->blocked) != 0;
        else if (!LOAD(&w->blocked) && LOAD(&w->stands_in) == STANDS_IN)
            found.others += i < slot || LOAD(&w->running);
    }
    return found;
}
/* Whether this stand-in may begin a task. At most as many stand-ins run as regular workers wait
 * inside tasks. A stand-in steps aside by itself, and only the node lets it begin again
 * (release_stand_ins): two stand-ins that decided concurrently could both begin. */
SELDOM static int stand_in_begins(char *c, unsigned pool, unsigned slot) {
    shm_client *me = client_of(c, slot);
    stand_in_counts now;
    if (LOAD(&me->stands_in) == STANDS_ASIDE)
        return 0;
    now = count_stand_ins(c, pool, slot);
    if (now.others < now.waiting)
        return 1;
    if (!CAS32(&me->stands_in, STANDS_IN, STANDS_ASIDE))
        return 1; /* a regular worker */
    now = count_stand_ins(c, pool, CLIENTS);
    if (now.others < now.waiting) /* a worker has begun to wait before the node could see this */
        wake_node(c);
    return 0;
}
/* For the node: lets as many stand-ins begin as are missing for the waiting workers. */
static inline void release_stand_ins(char *c, unsigned pool) {
    stand_in_counts now = count_stand_ins(c, pool, CLIENTS);
    for (unsigned i = 0; i < CLIENTS && now.others < now.waiting; i++)
        if (is_worker_of(c, pool, i) && !LOAD(&client_of(c, i)->blocked) &&
            CAS32(&client_of(c, i)->stands_in, STANDS_ASIDE, STANDS_IN)) {
            wake_for_task(c, i);
            now.others++;
        }
}
/* Whether this regular worker may begin a task. After tasks have waited for nested ones, stand-ins
 * may still run tasks although no worker waits any longer. Then a free worker declines until fewer
 * tasks run than the pool has regular workers. Of several free workers those in lower slots come
 * first: two that decided concurrently could both begin. */
SELDOM static int own_begins(char *c, unsigned pool, unsigned slot) {
    unsigned own = 1, busy = 0;
    for (unsigned i = 0; i < CLIENTS; i++) {
        shm_client *w = client_of(c, i);
        int is_own = LOAD(&w->stands_in) == STANDS_NOT;
        if (i == slot || !is_worker_of(c, pool, i))
            continue;
        own += is_own;
        if (!LOAD(&w->blocked))
            busy += LOAD(&w->running) || (is_own && i < slot);
    }
    return busy < own;
}
static inline int may_begin(char *c, unsigned pool, unsigned slot) {
    if (LOAD(&client_of(c, slot)->stands_in) != STANDS_NOT)
        return stand_in_begins(c, pool, slot);
    return !LOAD(&pool_of(c, pool)->stand_ins) || slot == NODE_SLOT || own_begins(c, pool, slot);
}
/* Wakes the workers that have declined. Called when a worker ends a task or blocks inside one. */
SELDOM static void wake_all_declined(char *c, unsigned pool) {
    for (unsigned i = 0; i < CLIENTS; i++)
        if (is_worker_of(c, pool, i) && LOAD(&client_of(c, i)->stands_in) == STANDS_NOT)
            wake_for_task(c, i);
}
static inline void wake_declined(char *c, unsigned slot) {
    shm_client *me = client_of(c, slot);
    shm_pool *p = pool_of(c, me->pool);
    if (LOAD(&me->kind) != CLIENT_WORKER || !LOAD(&p->declined))
        return;
    STORE(&p->declined, 0); /* a woken worker declines again if it must */
    wake_all_declined(c, me->pool);
}
static inline void set_running(char *c, unsigned slot, uint64_t id) {
    STORE(&client_of(c, slot)->running, id);
    if (!id)
        wake_declined(c, slot);
}
/* The next task, claimed by this worker, or 0. Starts at another queue each time. Tasks sent by
 * workers come first, because workers wait for them: if stand-ins took one outer task after the
 * other, all of them would wait in the end. */
static inline uint64_t queue_take(char *c, unsigned pool, unsigned slot, unsigned *start) {
    unsigned queues = LOAD(&root_of(c)->queues_high);
    int ranked = LOAD(&pool_of(c, pool)->ranked) != 0;
    uint64_t id = 0;
    if (!may_begin(c, pool, slot))
        return 0;
    if (ranked && !(id = take_waited_for(c, pool, slot)))
        id = bag_take(c, pool, slot, queues, 1, NULL);
    if (!id)
        id = queue_take_some(c, pool, slot, start, queues, 1);
    if (!id && ranked)
        id = bag_take(c, pool, slot, queues, 0, NULL);
    if (!id)
        id = queue_take_some(c, pool, slot, start, queues, 0);
    if (!id && ranked)
        id = bag_take(c, pool, slot, queues, INT32_MIN, NULL);
    return id;
}
/* A poster that saw this worker spin or idle woke no other worker. If this worker has found other
 * work, another must take the rest. */
static inline void wake_for_rest(char *c, unsigned pool) {
    unsigned queues = LOAD(&root_of(c)->queues_high);
    uint64_t left = 0;
    for (unsigned k = 0; k < queues; k++) {
        shm_queue *q = queue_of(c, k);
        if (LOAD(&q->owner) && LOAD(&q->pool) == pool) {
            if (LOAD(&q->bag)) {
                left += bag_count(q);
                continue;
            }
            uint64_t head = LOAD(&q->head), tail = LOAD(&q->tail);
            left += tail > head ? tail - head : 0;
        }
    }
    if (left)
        wake_worker(c, pool, left);
}
/* Waits for a task until the deadline. 0: timeout, or the client must check its state. */
static inline uint64_t task_next(char *c, unsigned pool, unsigned slot, unsigned *start,
                                 uint64_t deadline) {
    shm_root *r = root_of(c);
    shm_client *me = client_of(c, slot);
    shm_pool *p = pool_of(c, pool);
    uint32_t seen = LOAD(&me->task); /* read before all checks, so that no wake-up is missed */
    uint64_t bit = 1ULL << (slot % 64), id = queue_take(c, pool, slot, start);
    if (id || LOAD(&r->closing))
        return id;
    if (!may_begin(c, pool, slot)) {
        /* The node wakes a stand-in: release_stand_ins(), wake_for_task(). Other workers wake a
         * regular worker: wake_declined(). They read `declined` after they have ended a task or
         * begun to wait, and this worker checks them after it has written it. */
        uint64_t from = now_ns();
        STORE(&p->declined, 1);
        wake_for_rest(c, pool); /* the poster may rely on this worker */
        if (from < deadline && !LOAD(&r->closing) && !LOAD(&me->retire) && LOAD(&p->state) < 2 &&
            !may_begin(c, pool, slot))
            futex_wait(&me->task, seen,
                       (int64_t)(deadline - from < SLICE_NS ? deadline - from : SLICE_NS));
        return 0;
    }
    uint64_t now = now_ns(), spin_until = now + (uint64_t)r->spin_us_max * 1000;
    if (spin_begin(c, slot, NULL)) {
        OR(&p->spinning[slot / 64], bit);
        while (!id && now < spin_until && !LOAD(&r->closing)) {
            pause_burst();
            id = queue_take(c, pool, slot, start);
            now = now_ns();
        }
        AND(&p->spinning[slot / 64], ~bit);
        spin_end(c, slot);
        if (id) {
            wake_for_rest(c, pool);
            return id;
        }
    }
    OR(&p->idle[slot / 64], bit);
    id = queue_take(c, pool, slot, start);
    now = now_ns();
    if (!id && now < deadline && !LOAD(&r->closing) && !LOAD(&me->retire) &&
        may_begin(c, pool, slot)) {
        uint64_t left = deadline - now;
        futex_wait(&me->task, seen, (int64_t)(left < SLICE_NS ? left : SLICE_NS));
    }
    AND(&p->idle[slot / 64], ~bit);
    /* Found after the end of spinning: processes that saw it spin, or idle, rely on it. So they do
     * if it must end; the node has started another worker in its place. */
    if (id || LOAD(&me->retire) & RETIRE_ENDS || !may_begin(c, pool, slot)) {
        wake_for_rest(c, pool);
        return id;
    }
    return queue_take(c, pool, slot, start);
}

/* -- waiting ------------------------------------------------------------------------------ */

static inline int has_news(char *c, const uint16_t *tables, int n) {
    for (int i = 0; i < n; i++)
        if (LOAD(&table_of(c, tables[i])->done_summary))
            return 1;
    return 0;
}
/* Drops done ids from the end; returns the number of the others. Stops once the answer to "are more
 * than `most` pending?" is known. A wait for all of many ids, or for one of them when some are
 * done, checks one id each time. */
static inline int still_pending(char *c, uint64_t *ids, int n, int most) {
    int pending = 0;
    for (int i = n; i-- > 0 && pending <= most && n > most;) {
        uint64_t w = LOAD(&header_of(c, ids[i])->word);
        int done = WORD_GENERATION(w) != ID_GENERATION(ids[i]) || state_done(WORD_STATE(w)) ||
                   WORD_STATE(w) == ST_FREED;
        if (done)
            ids[i] = ids[--n];
        else
            pending++;
    }
    return n;
}
/* For `dump`: shows the latest waiting thread. The fields may mix if two threads write at once. */
static inline void says_waiting(shm_client *me, uint64_t id, uint64_t n, uint64_t now) {
    if (LOAD(&me->waiting_last) != id) {
        STORE(&me->waiting_last, id);
        STORE(&me->waiting_ns, now);
    }
    STORE(&me->waiting_n, n);
    STORE(&me->waiting_id, id);
}
/* Waits until at most `pending_max` of the ids are pending, or (news) a result of this client has
 * arrived, or the event word differs from *event (event != NULL). WAIT_AGAIN: check signals, call
 * again. */
static inline int wait_for(char *c, unsigned slot, uint64_t *ids, int *n, int pending_max,
                           const uint16_t *tables, int n_tables, const uint32_t *event,
                           int spin, uint64_t deadline) {
    shm_root *r = root_of(c);
    shm_private *own = private_of(c);
    shm_client *me = client_of(c, slot);
    uint64_t now = 0, spin_until = 0;
    int spinning = 0, bursts = 0, result;
    for (;;) {
        uint32_t seen = LOAD(&me->event);
        *n = still_pending(c, ids, *n, pending_max);
        if (*n <= pending_max && pending_max >= 0) {
            result = WAIT_DONE;
            break;
        }
        if (event && *event != seen) {
            result = WAIT_DONE;
            break;
        }
        if (n_tables && has_news(c, tables, n_tables)) {
            result = WAIT_NEWS;
            break;
        }
        if (LOAD(&own->lost)) {
            result = WAIT_CLOSING;
            break;
        }
        now = now_ns();
        if (now >= deadline) {
            result = WAIT_TIMEOUT;
            break;
        }
        if (!spin_until)
            spin_until = now + (uint64_t)r->spin_us_max * 1000;
        if (spin && now < spin_until) {
            if (!spinning)
                spinning = spin_begin(c, slot, NULL);
            if (spinning || bursts++ < POLITE_BURSTS) {
                pause_burst();
                continue;
            }
        }
        if (spinning) {
            spin_end(c, slot);
            spinning = 0;
        }
        spin_until = now; /* does not spin again after a sleep */
        if (*n > 0)
            says_waiting(me, ids[*n - 1], (uint64_t)(*n - pending_max), now);
        ADD(&me->sleeping, 1);
        uint64_t left = deadline - now;
        int rc = futex_wait(&me->event, seen, (int64_t)(left < SLICE_NS ? left : SLICE_NS));
        int why = errno;
        ADD(&me->sleeping, -1);
        errno = why;
        if (rc && (errno == EINTR || errno == ETIMEDOUT)) {
            result = WAIT_AGAIN;
            break;
        }
    }
    if (spinning)
        spin_end(c, slot);
    return result;
}
#endif
