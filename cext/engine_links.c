/* Links: choose the next frame to send, and handle the bytes received.
 *
 * The engine's thread moves a link's bytes through a socket, or Python threads do, through TLS.
 * Both ask here for the next place and the next frame, so peers are checked in one place: any
 * violation of engine_frames.h ends the link, and bytes are only written where a pull of ours has
 * requested them.
 */
#include "engine_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

struct link *link_new(uint64_t number, uint64_t peer, uint64_t peer_incarnation,
                      bool driven, bool checksum) {
    struct link *link = engine_memory(sizeof *link);
    link->number = number;
    link->peer = peer;
    link->peer_incarnation = peer_incarnation;
    link->fd = -1;
    link->driven = driven;
    link->checksum = checksum;
    chain_init(&link->in_links);
    chain_init(&link->in_active);
    chain_init(&link->notices);
    chain_init(&link->ready);
    chain_init(&link->ready_folded);
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_cond_init(&link->changed, &clock);
    pthread_condattr_destroy(&clock);
    return link;
}

void link_open(struct engine *engine, struct link *link) {
    chain_append(&engine->links, &link->in_links);
    link->readable = link->writable = true;
    link_wake(engine, link);
}

void link_free(struct link *link) {
    chain_remove(&link->in_links);
    free(link->pulls);
    free(link->serves);
    free(link->in_coll);
    pthread_cond_destroy(&link->changed);
    free(link);
}

/* There may be something to send or to receive. */
void link_wake(struct engine *engine, struct link *link) {
    if (!link->lost && chain_empty(&link->in_active)) chain_append(&engine->active, &link->in_active);
}

static void end_streams(struct engine *engine, struct link *link, const char *reason) {
    for (uint32_t place = 0; place < link->serves_length; place++)
        if (link->serves[place]) serve_end(engine, link->serves[place]);
    for (uint32_t place = 0; place < link->pulls_length; place++) {
        struct pull *pull = link->pulls[place];
        if (!pull) continue;
        if (pull->cell) engine_tell(engine, EVENT_PULL_FAILED, pull->cell->number, 0, reason);
        pull_end(pull);
    }
}

/* The single end of every link. Others may still refer to it until FREE. */
void link_lose(struct engine *engine, struct link *link, const char *reason) {
    if (link->lost) return;
    char words[REASON_BYTES]; /* `reason` may be in the link itself */
    snprintf(words, sizeof words, "%s", reason);
    driven_lose(engine, link, words);
    chain_remove(&link->in_active);
    socket_close(engine, link);
    engine_tell(engine, EVENT_LINK_LOST, link->number, link->peer, words);
    end_streams(engine, link, words);
    while (!chain_empty(&link->notices)) {
        struct notice *notice = FROM(link->notices.next, struct notice, in_notices);
        chain_remove(&notice->in_notices);
        free(notice->block);
        free(notice);
    }
    free(link->out_copy);
    link->out_copy = NULL;
    link->out_cell = NULL;
    link->out_full = false;
    link->in_pull = NULL;
    coll_link_lost(engine, link);
}

/* ---- Sending ---------------------------------------------------------------------------------- */
void link_notify(struct engine *engine, struct link *link, const struct frame *frame) {
    link_notify_block(engine, link, frame, NULL);
}

void link_notify_block(struct engine *engine, struct link *link, const struct frame *frame,
                       char *block) {
    if (link->lost) {
        free(block);
        return;
    }
    struct notice *notice = engine_memory(sizeof *notice);
    notice->frame = *frame;
    notice->block = block;
    if (block && link->checksum) notice->frame.block_crc = crc32c(0, block, frame->length);
    chain_append(&link->notices, &notice->in_notices);
    link_wake(engine, link);
}

static void seal(const struct engine *engine, struct link *link) {
    link->out.magic = FRAME_MAGIC;
    link->out.incarnation = engine->incarnation;
    frame_seal(&link->out);
    link->out_sent = 0;
    link->out_full = true;
}

/* The stream with the next turn; NULL: none has a block. */
static struct serve *next_serve(struct link *link) {
    const bool folded = !chain_empty(&link->ready_folded);
    if (!folded) link->before_folded = 0;
    struct chain *from = &link->ready;
    if (folded && (chain_empty(from) || link->before_folded >= BEFORE_FOLDED_MAX)) {
        link->before_folded = 0;
        from = &link->ready_folded;
    } else if (folded) {
        link->before_folded++;
    }
    return chain_empty(from) ? NULL : FROM(from->next, struct serve, in_ready);
}

static void next_block(struct engine *engine, struct link *link, struct serve *serve) {
    struct cell *cell = serve->cell;
    const struct frame_key key = cell->key;
    const uint32_t length = (uint32_t)(serve_goal(serve) - serve->next);
    link->out_cell = cell;
    link->out_block = cell->bytes + serve->next;
    link->out = (struct frame){
        .type = FRAME_DATA,
        .length = length,
        .operation = key.operation,
        .epoch = key.epoch,
        .stripe = key.stripe,
        .part = key.part,
        .pull = serve->number,
        .offset = serve->next,
        .end = serve->end,
        .block_crc = link->checksum ? cell_checksum(cell, serve->next, length) : 0,
    };
    serve->next += length;
    chain_remove(&serve->in_ready);
    if (serve->next == serve->end)
        serve_end(engine, serve);
    else
        serve_look(engine, serve); /* behind the others: they take turns */
    seal(engine, link);
}

/* Notices first, then one block of the next stream. False: nothing to send. */
bool link_next_frame(struct engine *engine, struct link *link) {
    if (!chain_empty(&link->notices)) {
        struct notice *notice = FROM(link->notices.next, struct notice, in_notices);
        link->out = notice->frame;
        link->out_block = link->out_copy = notice->block;
        chain_remove(&notice->in_notices);
        free(notice);
        seal(engine, link);
        return true;
    }
    struct serve *serve = next_serve(link);
    if (serve) next_block(engine, link, serve);
    return serve;
}

void link_frame_sent(struct engine *engine, struct link *link) {
    (void)engine;
    if (link->out.type == FRAME_REFUSED) link->refusal_count--;
    free(link->out_copy);
    link->out_copy = NULL;
    link->out_cell = NULL;
    link->out_block = NULL;
    link->out_full = false;
}

/* The cell's memory will be freed. A header already promises the rest of its block, and a peer may be
 * slow: the rest is copied, so that no one waits for that peer. */
void link_let_go_of(struct link *link, struct cell *cell) {
    if (link->out_cell != cell || link->frame_out) return;
    const uint32_t sent = link->out_sent > FRAME_BYTES ? link->out_sent - FRAME_BYTES : 0;
    const uint32_t length = link->out.length;
    link->out_copy = engine_memory(length);
    memcpy(link->out_copy + sent, link->out_block + sent, length - sent);
    link->out_block = link->out_copy;
    link->out_cell = NULL;
}

/* ---- Receiving -------------------------------------------------------------------------------- */
/* Where the next bytes go. Never empty. */
struct iovec link_place(struct engine *engine, struct link *link) {
    if (!link->in_block)
        return (struct iovec){(char *)&link->in + link->in_header_bytes,
                              FRAME_BYTES - link->in_header_bytes};
    const size_t rest = link->in.length - link->in_block_bytes;
    if (link->in.type == FRAME_COLL)
        return (struct iovec){link->in_coll + link->in_block_bytes,
                              rest < SCRATCH_BYTES ? rest : SCRATCH_BYTES};
    if (!link->in_pull->cell)
        return (struct iovec){engine->scratch, rest < SCRATCH_BYTES ? rest : SCRATCH_BYTES};
    return (struct iovec){link->in_pull->cell->bytes + link->in.offset + link->in_block_bytes,
                          rest};
}

static const char *begin_block(struct link *link) {
    const struct frame *frame = &link->in;
    const struct frame_key key = frame_key(frame);
    struct pull *pull = pull_of(link, frame->pull);
    if (!pull) return "bytes that were not requested";
    if (!frame_key_equal(&key, &pull->key) || frame->end != pull->end)
        return "bytes of another cell than the requested one";
    if (frame->offset != pull->next) return "bytes that do not continue the stream";
    link->in_pull = pull;
    link->in_block = true;
    link->in_block_bytes = 0;
    link->in_crc = 0;
    return NULL;
}

static const char *begin_coll(struct engine *engine, struct link *link) {
    if (!link->in.length) {
        link->in_header_bytes = 0;
        return coll_frame(engine, link, &link->in, NULL);
    }
    if (!link->in_coll) link->in_coll = engine_memory(FRAME_COLL_BYTES_MAX);
    link->in_pull = NULL;
    link->in_block = true;
    link->in_block_bytes = 0;
    link->in_crc = 0;
    return NULL;
}

/* A block with a wrong checksum was corrupted in transit, or written at its source while it was
 * sent (an array that its owner shares in place). The stream continues after it, so only this pull
 * fails, and the owner of the cell pulls the rest again. */
static void end_spoiled(struct engine *engine, struct pull *pull) {
    if (pull->cell)
        engine_tell(engine, EVENT_PULL_FAILED, pull->cell->number, 0,
                    "a block does not match its checksum");
    if (pull->next == pull->end)
        pull_end(pull);
    else if (pull->cell)
        pull_cancel(engine, pull);
}

static const char *end_block(struct engine *engine, struct link *link) {
    struct pull *pull = link->in_pull;
    const bool spoiled = link->checksum && link->in_crc != link->in.block_crc;
    link->in_block = false;
    link->in_pull = NULL;
    link->in_header_bytes = 0;
    /* a small call is not requested again: it is lost with its link */
    if (link->in.type == FRAME_COLL)
        return spoiled ? "a small call does not match its checksum"
                       : coll_frame(engine, link, &link->in, link->in_coll);
    pull->next += link->in.length;
    if (spoiled) {
        end_spoiled(engine, pull);
        return NULL;
    }
    struct cell *cell = pull->cell;
    const uint64_t next = pull->next;
    if (cell && link->checksum)
        cell_keep_checksum(cell, link->in.offset, link->in.length, link->in_crc);
    if (next == pull->end) pull_end(pull);
    if (cell) cell_raise(engine, cell, next);
    return NULL;
}

static const char *const REASONS[REASON_END] = {
    [REASON_CLOSED] = "the peer has closed the cell",
    [REASON_SIZE] = "the peer's cell ends before that",
    [REASON_FULL] = "too many requests wait at the peer",
    [REASON_CANCELLED] = "cancelled",
};

static const char *take_refusal(struct engine *engine, struct link *link) {
    struct pull *pull = pull_of(link, link->in.pull);
    if (!pull) return "a refusal of no request";
    if (pull->cell) {
        if (link->in.reason == REASON_CANCELLED) return "the answer to a CANCEL that was not sent";
        engine_tell(engine, EVENT_PULL_FAILED, pull->cell->number, 0, REASONS[link->in.reason]);
    }
    pull_end(pull);
    return NULL;
}

static const char *take_header(struct engine *engine, struct link *link) {
    const struct frame *frame = &link->in;
    const char *fault = frame_fault(frame);
    if (fault) return fault;
    if (!link->peer_incarnation) link->peer_incarnation = frame->incarnation;
    if (frame->incarnation != link->peer_incarnation) return "a frame of another incarnation";
    if (frame->type == FRAME_COLL) return begin_coll(engine, link);
    if (!frame->pull) return "a frame without a pull";
    if (frame->type == FRAME_DATA) return begin_block(link);
    link->in_header_bytes = 0;
    if (frame->type == FRAME_REQUEST) return serve_request(engine, link, frame);
    if (frame->type == FRAME_REFUSED) return take_refusal(engine, link);
    serve_cancel(engine, link, frame->pull);
    return NULL;
}

/* This many bytes were written to the place. False: the link is lost. */
bool link_took(struct engine *engine, struct link *link, size_t bytes) {
    const char *fault = NULL;
    if (link->in_block) {
        const struct iovec place = link_place(engine, link);
        if (link->checksum) link->in_crc = crc32c(link->in_crc, place.iov_base, bytes);
        link->in_block_bytes += (uint32_t)bytes;
        if (link->in_block_bytes == link->in.length) fault = end_block(engine, link);
    } else {
        link->in_header_bytes += (uint32_t)bytes;
        if (link->in_header_bytes == FRAME_BYTES) fault = take_header(engine, link);
    }
    if (fault) link_lose(engine, link, fault);
    return !fault;
}
