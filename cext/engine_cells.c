/* Cells: lookup by key, progress, and release.
 *
 * Every transfer and fold is triggered by a rising watermark. When the engine reports a cell as
 * closed, no thread uses its memory.
 */
#include "engine_state.h"

#include <stdlib.h>

/* ---- Keys ------------------------------------------------------------------------------------ */
static size_t bucket_of(const struct engine *engine, const struct frame_key *key) {
    uint64_t mixed = key->operation ^ ((uint64_t)key->epoch << 32 | key->stripe);
    mixed = (mixed ^ mixed >> 31) * 0x9e3779b97f4a7c15u + key->part;
    mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u;
    return (mixed >> 20) & (engine->bucket_count - 1);
}

static void grow(struct engine *engine) {
    struct spot **old = engine->buckets;
    const size_t old_count = engine->bucket_count;
    engine->bucket_count = old_count ? 2 * old_count : 64;
    engine->buckets = engine_memory(engine->bucket_count * sizeof *engine->buckets);
    for (size_t i = 0; i < old_count; i++)
        for (struct spot *spot = old[i], *next; spot; spot = next) {
            next = spot->next;
            const size_t bucket = bucket_of(engine, &spot->key);
            spot->next = engine->buckets[bucket];
            engine->buckets[bucket] = spot;
        }
    free(old);
}

/* The entry of the key, made if needed. */
struct spot *spot_at(struct engine *engine, const struct frame_key *key) {
    if (engine->spot_count >= engine->bucket_count) grow(engine);
    struct spot **bucket = &engine->buckets[bucket_of(engine, key)];
    for (struct spot *spot = *bucket; spot; spot = spot->next)
        if (frame_key_equal(&spot->key, key)) return spot;
    struct spot *spot = engine_memory(sizeof *spot);
    spot->key = *key;
    chain_init(&spot->waiting);
    spot->next = *bucket;
    *bucket = spot;
    engine->spot_count++;
    return spot;
}

void spot_drop_if_unused(struct engine *engine, struct spot *spot) {
    if (spot->cell || !chain_empty(&spot->waiting)) return;
    struct spot **at = &engine->buckets[bucket_of(engine, &spot->key)];
    while (*at != spot) at = &(*at)->next;
    *at = spot->next;
    engine->spot_count--;
    free(spot);
}

/* ---- Cells ----------------------------------------------------------------------------------- */
/* Equal on both sides of a link if their block_bytes_max are equal; nothing depends on that. */
static uint64_t block_bytes_for(uint64_t nbytes, uint64_t block_bytes_max) {
    const uint64_t line = REDUCE_LINE_BYTES;
    const uint64_t wanted = (nbytes / BLOCKS_WANTED + line - 1) / line * line;
    if (wanted > block_bytes_max) return block_bytes_max;
    return wanted < BLOCK_BYTES_MIN ? BLOCK_BYTES_MIN : wanted;
}

struct cell *cell_new(const struct engine *engine, uint64_t number, void *bytes, uint64_t nbytes,
                      uint64_t watermark, const struct frame_key *key) {
    struct cell *cell = engine_memory(sizeof *cell);
    cell->number = number;
    cell->bytes = bytes;
    cell->nbytes = nbytes;
    cell->block_bytes = block_bytes_for(nbytes, engine->block_bytes_max);
    atomic_init(&cell->watermark, watermark);
    if (key) {
        cell->has_key = true;
        cell->key = *key;
    }
    chain_init(&cell->serves);
    chain_init(&cell->feeds);
    return cell;
}

void cell_free(struct cell *cell) {
    free(cell->checksums);
    free(cell);
}

/* The end of the block that begins at `from`: the next block boundary, or the end of the cell.
 * Counted from the cell's beginning, so that a pull that resumed inside a block is soon aligned
 * with the incoming blocks, and no byte waits for more than its own block. */
uint64_t cell_goal(const struct cell *cell, uint64_t from) {
    const uint64_t goal = (from / cell->block_bytes + 1) * cell->block_bytes;
    return goal < cell->nbytes ? goal : cell->nbytes;
}

/* ---- Checksums ---------------------------------------------------------------------------------
 * Many peers may pull one block. A block that a fold has written, or whose checksum was verified,
 * no longer changes, so its checksum is computed once, and a relay passes on the checksum that it
 * has verified: receivers then detect corruption in this host's memory. An array that its owner
 * shares in place may change, so its checksum is computed each time.
 */
enum { CHECKSUM_KNOWN = 32 }; /* the bit above a known checksum */

/* NULL if that is not a whole block of the cell. */
static uint64_t *checksum_of(struct cell *cell, uint64_t from, uint32_t length) {
    if (from % cell->block_bytes || from + length != cell_goal(cell, from)) return NULL;
    if (!cell->checksums)
        cell->checksums = engine_memory((cell->nbytes / cell->block_bytes + 1) * sizeof(uint64_t));
    return &cell->checksums[from / cell->block_bytes];
}

void cell_keep_checksum(struct cell *cell, uint64_t from, uint32_t length, uint32_t checksum) {
    if (!cell->has_key) return; /* no peer pulls from it */
    uint64_t *known = checksum_of(cell, from, length);
    if (known) *known = 1ull << CHECKSUM_KNOWN | checksum;
}

uint32_t cell_checksum(struct cell *cell, uint64_t from, uint32_t length) {
    uint64_t *known = cell->checksums || cell->folded ? checksum_of(cell, from, length) : NULL;
    if (known && *known >> CHECKSUM_KNOWN) return (uint32_t)*known;
    const uint32_t checksum = crc32c(0, cell->bytes + from, length);
    if (known && cell->folded) *known = 1ull << CHECKSUM_KNOWN | checksum;
    return checksum;
}

/* Serves requests that waited for the key. Python ensures that no other open cell has the key. */
void cell_open(struct engine *engine, struct cell *cell) {
    if (!cell->has_key) return;
    cell->spot = spot_at(engine, &cell->key);
    cell->spot->cell = cell;
    while (!chain_empty(&cell->spot->waiting)) {
        struct serve *serve = FROM(cell->spot->waiting.next, struct serve, in_source);
        serve->link->waiting_count--;
        serve->spot = NULL;
        serve_attach(engine, serve, cell);
    }
}

/* Reports the full cells of the batch. Its cells are reported individually from now on. */
static void batch_end(struct engine *engine, struct batch *batch) {
    const bool voted = batch->plan && !batch->unfilled && coll_cells_full(engine, batch);
    for (size_t i = 0; i < batch->count; i++) {
        struct cell *cell = batch->cells[i];
        cell->batch = NULL;
        if (cell->told) engine_tell_filled(engine, cell->number, voted);
    }
    free(batch);
}

/* Takes cells out of other batches, which ends those. Invariant: no cell of a batch was reported
 * earlier, and a batch has at least one cell that is not full. */
void batch_begin(struct engine *engine, struct batch *batch) {
    size_t kept = 0;
    for (size_t i = 0; i < batch->count; i++) {
        struct cell *cell = batch->cells[i];
        if (cell->batch) batch_end(engine, cell->batch);
        if (!cell->told) batch->cells[kept++] = cell;
    }
    for (size_t i = 0; i < kept; i++) batch->cells[i]->batch = batch;
    batch->count = batch->unfilled = kept;
    if (!kept) batch_end(engine, batch);
}

/* Once: when the last byte has arrived, or when a full cell is to be filled. */
void cell_tell_filled(struct engine *engine, struct cell *cell) {
    if (cell->told) return;
    cell->told = true;
    if (!cell->batch)
        engine_tell_filled(engine, cell->number, false);
    else if (!--cell->batch->unfilled)
        batch_end(engine, cell->batch);
}

/* The bytes before the new watermark are written and visible to its readers. */
void cell_raise(struct engine *engine, struct cell *cell, uint64_t watermark) {
    atomic_store_explicit(&cell->watermark, watermark, memory_order_release);
    for (struct chain *at = cell->serves.next; at != &cell->serves; at = at->next)
        serve_look(engine, FROM(at, struct serve, in_source));
    for (struct chain *at = cell->feeds.next; at != &cell->feeds; at = at->next)
        fold_look(engine, FROM(at, struct fold_source, in_cell)->fold);
    if (watermark == cell->nbytes) cell_tell_filled(engine, cell);
}

/* The owner has written the cell up to there. */
void cell_advance(struct engine *engine, struct cell *cell, uint64_t watermark) {
    if (watermark > atomic_load_explicit(&cell->watermark, memory_order_relaxed))
        cell_raise(engine, cell, watermark);
}

/* A thread that drives a link has returned the memory. */
void cell_let_go(struct engine *engine, struct cell *cell) {
    if (cell->closing && !cell->holds) engine_tell(engine, EVENT_CLOSED, cell->number, 0, "");
}

/* Peers that pull it are refused. */
void cell_close(struct engine *engine, struct cell *cell) {
    cell->closing = true;
    if (cell->batch) batch_end(engine, cell->batch);
    if (cell->pull) pull_cancel(engine, cell->pull);
    if (cell->fold) fold_end(cell->fold);
    while (!chain_empty(&cell->feeds))
        fold_fail(engine, FROM(cell->feeds.next, struct fold_source, in_cell)->fold,
                  "a source was closed");
    while (!chain_empty(&cell->serves))
        serve_refuse(engine, FROM(cell->serves.next, struct serve, in_source), REASON_CLOSED);
    if (cell->spot) {
        cell->spot->cell = NULL;
        spot_drop_if_unused(engine, cell->spot);
        cell->spot = NULL;
    }
    for (struct chain *at = engine->links.next; at != &engine->links; at = at->next)
        link_let_go_of(FROM(at, struct link, in_links), cell);
    cell_let_go(engine, cell);
}
