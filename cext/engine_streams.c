/* Pulls and serves: the two ends of a stream of blocks, and their ends.
 *
 * CANCEL and DATA may cross, so a cancelled pull has not ended yet. A pull keeps its number until
 * its last byte or REFUSED has arrived; a serve ends when its last block is handed to the link or
 * its refusal is queued. A link keeps order, so a number is free at the server before the puller
 * can use it again, and every byte of a stream is accounted for.
 */
#include "engine_state.h"

#include <stdlib.h>

/* ---- Pulls ----------------------------------------------------------------------------------- */
enum { PLACE_BITS = 16, PLACE_MASK = LINK_PULLS_MAX - 1 };
_Static_assert(1 << PLACE_BITS == LINK_PULLS_MAX, "a place fits the lower half of a number");

struct pull *pull_of(const struct link *link, uint32_t number) {
    const uint32_t place = number & PLACE_MASK;
    struct pull *pull = place < link->pulls_length ? link->pulls[place] : NULL;
    return pull && pull->number == number ? pull : NULL;
}

static void *grown(void *table, uint32_t *length, uint32_t needed) {
    uint32_t count = *length ? *length : 16;
    while (count < needed) count *= 2;
    void **larger = engine_memory(count * sizeof *larger);
    for (uint32_t i = 0; i < *length; i++) larger[i] = ((void **)table)[i];
    free(table);
    *length = count;
    return larger;
}

/* A number whose place is free; the caller has checked that there is one. */
static uint32_t free_number(struct link *link) {
    if (link->pull_count == link->pulls_length)
        link->pulls = grown(link->pulls, &link->pulls_length, link->pulls_length + 1);
    while (link->pulls[link->pull_next]) link->pull_next = (link->pull_next + 1) % link->pulls_length;
    link->pulls_made = link->pulls_made % 0xffff + 1; /* never 0 */
    return link->pulls_made << PLACE_BITS | link->pull_next;
}

static struct frame pull_frame(const struct pull *pull, uint8_t type) {
    return (struct frame){
        .type = type,
        .operation = pull->key.operation,
        .epoch = pull->key.epoch,
        .stripe = pull->key.stripe,
        .part = pull->key.part,
        .pull = pull->number,
        .offset = pull->next,
        .end = pull->end,
    };
}

void pull_begin(struct engine *engine, struct cell *cell, struct link *link,
                const struct frame_key *key) {
    const uint64_t watermark = atomic_load_explicit(&cell->watermark, memory_order_relaxed);
    const char *fault = NULL;
    if (watermark == cell->nbytes) {
        cell_tell_filled(engine, cell);
        return;
    }
    if (cell->pull) pull_cancel(engine, cell->pull);
    if (cell->fold) fault = "a fold fills the cell";
    if (link->lost) fault = "the link is lost";
    if (link->pull_count == LINK_PULLS_MAX) fault = "too many pulls over the link";
    if (fault) {
        engine_tell(engine, EVENT_PULL_FAILED, cell->number, 0, fault);
        return;
    }
    struct pull *pull = engine_memory(sizeof *pull);
    *pull = (struct pull){
        .link = link,
        .cell = cell,
        .key = *key,
        .number = free_number(link),
        .next = watermark,
        .end = cell->nbytes,
    };
    cell->pull = pull;
    link->pulls[pull->number & PLACE_MASK] = pull;
    link->pull_count++;
    const struct frame frame = pull_frame(pull, FRAME_REQUEST);
    link_notify(engine, link, &frame);
}

/* The cell is free at once; the number is not. */
void pull_cancel(struct engine *engine, struct pull *pull) {
    pull->cell->pull = NULL;
    pull->cell = NULL;
    const struct frame frame = pull_frame(pull, FRAME_CANCEL);
    link_notify(engine, pull->link, &frame);
}

void pull_end(struct pull *pull) {
    if (pull->cell) pull->cell->pull = NULL;
    pull->link->pulls[pull->number & PLACE_MASK] = NULL;
    pull->link->pull_count--;
    free(pull);
}

/* ---- Serves ---------------------------------------------------------------------------------- */
static struct serve *serve_of(const struct link *link, uint32_t number) {
    const uint32_t place = number & PLACE_MASK;
    struct serve *serve = place < link->serves_length ? link->serves[place] : NULL;
    return serve && serve->number == number ? serve : NULL;
}

static void refuse(struct engine *engine, struct link *link, uint32_t number, int reason) {
    const struct frame frame = {.type = FRAME_REFUSED, .reason = (uint8_t)reason, .pull = number};
    link->refusal_count++;
    link_notify(engine, link, &frame);
}

/* The end of its next block: a request for a part of a cell gets no more. */
uint64_t serve_goal(const struct serve *serve) {
    const uint64_t goal = cell_goal(serve->cell, serve->next);
    return goal < serve->end ? goal : serve->end;
}

/* Queues the serve if its next block is there. */
void serve_look(struct engine *engine, struct serve *serve) {
    if (!chain_empty(&serve->in_ready)) return;
    const uint64_t come = atomic_load_explicit(&serve->cell->watermark, memory_order_relaxed);
    if (serve->next >= serve->end || come < serve_goal(serve)) return;
    struct link *link = serve->link;
    chain_append(serve->cell->folded ? &link->ready_folded : &link->ready, &serve->in_ready);
    link_wake(engine, link);
}

void serve_attach(struct engine *engine, struct serve *serve, struct cell *cell) {
    chain_remove(&serve->in_source);
    if (serve->end > cell->nbytes) {
        serve_refuse(engine, serve, REASON_SIZE);
        return;
    }
    serve->cell = cell;
    chain_append(&cell->serves, &serve->in_source);
    serve_look(engine, serve);
}

/* A peer's REQUEST. Returns NULL, or why the link must end. */
const char *serve_request(struct engine *engine, struct link *link, const struct frame *frame) {
    const uint32_t place = frame->pull & PLACE_MASK;
    if (place < link->serves_length && link->serves[place])
        return "a request with a number in use";
    if (frame->offset >= frame->end) return "an empty request";
    if (link->refusal_count >= LINK_PULLS_MAX) return "a peer that sends requests but does not read";
    if (place >= link->serves_length)
        link->serves = grown(link->serves, &link->serves_length, place + 1);
    struct serve *serve = engine_memory(sizeof *serve);
    serve->link = link;
    serve->number = frame->pull;
    serve->next = frame->offset;
    serve->end = frame->end;
    chain_init(&serve->in_source);
    chain_init(&serve->in_ready);
    link->serves[place] = serve;
    const struct frame_key key = frame_key(frame);
    struct spot *spot = spot_at(engine, &key);
    if (spot->cell) {
        serve_attach(engine, serve, spot->cell);
    } else if (link->waiting_count < engine->waiting_requests_max) {
        serve->spot = spot;
        chain_append(&spot->waiting, &serve->in_source);
        link->waiting_count++;
    } else {
        serve_refuse(engine, serve, REASON_FULL);
        spot_drop_if_unused(engine, spot);
    }
    return NULL;
}

void serve_end(struct engine *engine, struct serve *serve) {
    chain_remove(&serve->in_ready);
    chain_remove(&serve->in_source);
    if (serve->spot) {
        serve->link->waiting_count--;
        spot_drop_if_unused(engine, serve->spot);
    }
    serve->link->serves[serve->number & PLACE_MASK] = NULL;
    free(serve);
}

void serve_refuse(struct engine *engine, struct serve *serve, int reason) {
    refuse(engine, serve->link, serve->number, reason);
    serve_end(engine, serve);
}

/* A peer's CANCEL. The end of a stream that is already over was or is being reported. */
void serve_cancel(struct engine *engine, struct link *link, uint32_t number) {
    struct serve *serve = serve_of(link, number);
    if (serve) serve_refuse(engine, serve, REASON_CANCELLED);
}
