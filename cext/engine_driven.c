/* Links whose bytes Python threads move through TLS, one thread for each direction.
 *
 * Python's SSLSocket does the TLS (OpenSSL is not linked here), but only the engine's thread
 * decides which frame is sent next and where received bytes go. That thread *gives* a frame to
 * send, or a place to receive into. The driving thread may use the memory until it returns it, and
 * a cell that is closed meanwhile reports CLOSED only then. One exchange per sent frame and two per
 * received block: block_bytes_max of 1 MiB suits such links.
 */
#include "engine_state.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- The engine's thread ------------------------------------------------------------------------ */
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

/* 0 bytes: the thread returns the place and will not continue. */
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

/* Wakes waiting threads, and takes back what no thread has taken. */
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

/* ---- Driving threads ---------------------------------------------------------------------------- */
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

/* A thread calls this before it waits, while nothing can stop the engine yet. The engine is then
 * not freed until the thread has returned. */
void driven_enter(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    engine->drivers++;
    pthread_mutex_unlock(&engine->lock);
}

/* Under the lock, after driven_enter(). */
static int wait_for(struct engine *engine, struct link *link, bool *given, double timeout_s,
                    char *reason) {
    const struct timespec deadline = deadline_in(timeout_s);
    /* Without a timeout, return at once: the kernel takes 50 us for a wait that has already
     * expired. */
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
        if (frame->type == FRAME_COLL && frame->length) { /* freed if the link is lost */
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

/* The caller owns the place: the thread does not read it. */
void driven_header(struct link *link, const char *header) {
    memcpy(&link->in, header, FRAME_BYTES);
}

void driven_coll(struct link *link, const char *bytes, size_t nbytes) {
    memcpy(link->in_coll + link->in_block_bytes, bytes, nbytes);
}

/* All links are lost, so all waiting threads return. */
void driven_wait_for_nobody(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    while (engine->drivers) pthread_cond_wait(&engine->undriven, &engine->lock);
    pthread_mutex_unlock(&engine->lock);
}
