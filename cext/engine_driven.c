/* Links whose bytes Python threads move, one thread for each direction, through TLS.
 *
 * Python's SSLSocket does the TLS (OpenSSL is not linked here), but only the engine's thread
 * decides which frame is sent next and where received bytes go. So that thread *gives*: a frame to
 * send, a place to receive into. Until the memory is given back, the driving thread may use it,
 * and a cell that is closed meanwhile says CLOSED only after it has come back. One exchange a frame
 * and two a block received: block_bytes_max of 1 MiB suits such links.
 */
#include "engine_state.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- The engine's thread gives, and takes back -------------------------------------------------- */
static void hold(struct cell *cell) {
    if (cell) cell->holds++;
}

static void let_go(struct engine *engine, struct cell *cell) {
    if (!cell) return;
    cell->holds--;
    cell_let_go(engine, cell);
}

static void give_frame(struct engine *engine, struct link *link) {
    if (!link_next_frame(engine, link)) return;
    hold(link->out_cell);
    pthread_mutex_lock(&engine->lock);
    link->frame_cell = link->out_cell;
    link->frame_out = link->frame_given = true;
    pthread_cond_broadcast(&link->changed);
    pthread_mutex_unlock(&engine->lock);
}

static void give_place(struct engine *engine, struct link *link) {
    const struct iovec place = link_place(engine, link);
    const bool small = link->in_block && link->in.type == FRAME_COLL;
    struct cell *cell = link->in_block && !small ? link->in_pull->cell : NULL;
    hold(cell);
    pthread_mutex_lock(&engine->lock);
    link->place_cell = cell;
    link->place_kind = !link->in_block ? PLACE_HEADER
                       : small         ? PLACE_COLL
                       : cell          ? PLACE_CELL
                                       : PLACE_SCRATCH;
    link->place_offset = cell ? (uint64_t)((char *)place.iov_base - cell->bytes) : 0;
    link->place_bytes = (uint32_t)place.iov_len;
    link->place_out = link->place_given = true;
    pthread_cond_broadcast(&link->changed);
    pthread_mutex_unlock(&engine->lock);
}

void driven_turn(struct engine *engine, struct link *link) {
    if (!link->frame_out) give_frame(engine, link);
    if (!link->place_out) give_place(engine, link);
}

static void count(_Atomic uint64_t *counter, uint64_t amount) {
    atomic_fetch_add_explicit(counter, amount, memory_order_relaxed);
}

void driven_sent(struct engine *engine, struct link *link) {
    struct cell *cell = link->frame_cell;
    link->frame_out = false;
    if (!link->lost) {
        count(&link->bytes_sent, FRAME_BYTES + link->out.length);
        link_frame_sent(engine, link);
        link_wake(engine, link);
    }
    let_go(engine, cell);
}

/* 0 bytes: the thread gives the place back and will not go on. */
void driven_received(struct engine *engine, struct link *link, uint32_t bytes) {
    struct cell *cell = link->place_cell;
    link->place_out = false;
    if (!bytes) link_lose(engine, link, "the peer has closed the connection");
    if (!link->lost) {
        count(&link->bytes_received, bytes);
        if (link_took(engine, link, bytes)) link_wake(engine, link);
    }
    let_go(engine, cell);
}

/* Who waits comes back, and what nobody has taken is not in anybody's hands. */
void driven_lose(struct engine *engine, struct link *link, const char *reason) {
    pthread_mutex_lock(&engine->lock);
    link->lost = true;
    snprintf(link->reason, sizeof link->reason, "%s", reason);
    struct cell *frame_cell = link->frame_given ? link->frame_cell : NULL;
    struct cell *place_cell = link->place_given ? link->place_cell : NULL;
    link->frame_given = link->place_given = false;
    pthread_cond_broadcast(&link->changed);
    pthread_mutex_unlock(&engine->lock);
    let_go(engine, frame_cell);
    let_go(engine, place_cell);
}

/* ---- The driving threads wait ------------------------------------------------------------------- */
static struct timespec deadline_in(double timeout_s) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    const double whole = (double)(time_t)timeout_s;
    at.tv_sec += (time_t)timeout_s;
    at.tv_nsec += (long)((timeout_s - whole) * 1e9);
    if (at.tv_nsec >= 1000000000) {
        at.tv_sec++;
        at.tv_nsec -= 1000000000;
    }
    return at;
}

/* Called by a thread before it waits, while nothing can stop the engine yet: from now on the engine is
 * not freed until that thread has come back. */
void driven_enter(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->drivers++;
    pthread_mutex_unlock(&engine->lock);
}

/* Under the lock, after driven_enter(). */
static int wait_for(struct engine *engine, struct link *link, bool *given, double timeout_s,
                    char *reason) {
    const struct timespec deadline = deadline_in(timeout_s);
    /* A caller that gives no time is answered at once: the kernel takes 50 us for a wait that is over
     * when it begins. */
    while (timeout_s > 0 && !link->lost && !*given)
        if (pthread_cond_timedwait(&link->changed, &engine->lock, &deadline) == ETIMEDOUT) break;
    if (link->lost) snprintf(reason, REASON_BYTES, "%s", link->reason);
    const int found = link->lost ? -1 : *given;
    if (found > 0) *given = false;
    if (!--engine->drivers) pthread_cond_broadcast(&engine->undriven);
    return found;
}

int driven_wait_frame(struct engine *engine, struct link *link, double timeout_s,
                      struct frame *frame, uint64_t *cell_number, char **small, char *reason) {
    pthread_mutex_lock(&engine->lock);
    const int found = wait_for(engine, link, &link->frame_given, timeout_s, reason);
    if (found > 0) {
        *frame = link->out;
        *cell_number = link->frame_cell ? link->frame_cell->number : 0;
        *small = NULL;
        if (frame->type == FRAME_COLL && frame->length) { /* it is freed if the link is lost */
            *small = engine_memory(frame->length);
            memcpy(*small, link->out_block, frame->length);
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

int driven_wait_place(struct engine *engine, struct link *link, double timeout_s, int *kind,
                      uint32_t *bytes, uint64_t *cell_number, uint64_t *offset, char *reason) {
    pthread_mutex_lock(&engine->lock);
    const int found = wait_for(engine, link, &link->place_given, timeout_s, reason);
    if (found > 0) {
        *kind = (int)link->place_kind;
        *bytes = link->place_bytes;
        *cell_number = link->place_cell ? link->place_cell->number : 0;
        *offset = link->place_offset;
    }
    pthread_mutex_unlock(&engine->lock);
    return found;
}

/* The place is in the caller's hands: the thread does not look at it. */
void driven_header(struct link *link, const char *header) {
    memcpy(&link->in, header, FRAME_BYTES);
}

void driven_coll(struct link *link, const char *bytes, size_t nbytes) {
    memcpy(link->in_coll + link->in_block_bytes, bytes, nbytes);
}

/* All links are lost, so all who wait come back. */
void driven_wait_for_nobody(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    while (engine->drivers) pthread_cond_wait(&engine->undriven, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
}
