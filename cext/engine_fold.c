/* Folds: a cell := op over other cells, as far as all of them have arrived.
 *
 * The engine sends a reduction while it computes it. The kernels (reduce_kernels.h) read the cells
 * in the order of the sources, a bounded step at a time, so that the result has the bits of one left
 * fold over all contributions:
 *
 *     raw source ──widen, fold──► accumulator ──divide──► narrow ──► final result
 *     accumulated source ─copy, fold──► │                └────────► partial result, sent on
 *
 * A partial result keeps the accumulator's dtype (float16, bfloat16: float32; mean of integers:
 * float64; others: their own) and becomes the first source of the next fold.
 */
#include "engine_state.h"

#include <stdlib.h>
#include <string.h>

/* ---- Choice of kernels ------------------------------------------------------------------------- */
int fold_accumulator(int op, int dtype) {
    if (!reduce_kernel_find(op, dtype)) return -1;
    if (dtype == REDUCE_FLOAT16 || dtype == REDUCE_BFLOAT16) return REDUCE_FLOAT32;
    if (op == REDUCE_MEAN && dtype <= REDUCE_UINT64) return REDUCE_FLOAT64;
    return dtype;
}
_Static_assert(REDUCE_BOOL < REDUCE_UINT64 && REDUCE_UINT64 < REDUCE_FLOAT16,
               "bool and integers come first");

/* The mean is a sum until the end. */
static const struct reduce_kernel *accumulator_kernel(int op, int dtype) {
    const int accumulator = fold_accumulator(op, dtype);
    return reduce_kernel_find(op == REDUCE_MEAN ? REDUCE_SUM : op, accumulator);
}

/* Bytes of an element of a source (raw or accumulated) or of a result (final or partial). */
size_t fold_item_bytes(int op, int dtype, bool accumulated, bool is_result) {
    const struct reduce_kernel *kernel = reduce_kernel_find(op, dtype);
    if (!kernel) return 0;
    if (accumulated) return reduce_source_bytes(accumulator_kernel(op, dtype));
    return is_result ? reduce_result_bytes(kernel) : reduce_source_bytes(kernel);
}

struct fold *fold_new(struct cell *cell, int op, int dtype, size_t divisor, bool final,
                      struct cell *const *sources, const bool *accumulated, size_t count) {
    struct fold *fold = engine_memory(sizeof *fold + count * sizeof *fold->sources);
    fold->cell = cell;
    fold->kernel = reduce_kernel_find(op, dtype);
    fold->fold_accumulated = accumulator_kernel(op, dtype)->fold;
    fold->divisor = op == REDUCE_MEAN ? divisor : 0;
    fold->final = final;
    fold->item_bytes = (uint32_t)fold_item_bytes(op, dtype, !final, true);
    fold->source_count = count;
    chain_init(&fold->in_ready);
    for (size_t i = 0; i < count; i++) {
        struct fold_source *source = &fold->sources[i];
        chain_init(&source->in_cell);
        source->fold = fold;
        source->cell = sources[i];
        source->accumulated = accumulated[i];
        source->item_bytes = (uint32_t)fold_item_bytes(op, dtype, accumulated[i], false);
    }
    return fold;
}

/* ---- Beginning and end ------------------------------------------------------------------------ */
void fold_end(struct fold *fold) {
    if (fold->cell->fold == fold) fold->cell->fold = NULL;
    chain_remove(&fold->in_ready);
    for (size_t i = 0; i < fold->source_count; i++) chain_remove(&fold->sources[i].in_cell);
    free(fold);
}

void fold_fail(struct engine *engine, struct fold *fold, const char *reason) {
    engine_tell(engine, EVENT_FOLD_FAILED, fold->cell->number, 0, reason);
    fold_end(fold);
}

void fold_begin(struct engine *engine, struct fold *fold) {
    struct cell *cell = fold->cell;
    if (atomic_load_explicit(&cell->watermark, memory_order_relaxed) == cell->nbytes) {
        cell_tell_filled(engine, cell);
        fold_end(fold);
        return;
    }
    if (cell->pull || cell->fold) {
        fold_fail(engine, fold, "something else fills the cell");
        return;
    }
    cell->fold = fold;
    cell->folded = true;
    for (size_t i = 0; i < fold->source_count; i++)
        chain_append(&fold->sources[i].cell->feeds, &fold->sources[i].in_cell);
    fold_look(engine, fold);
}

/* Folded elements; and the elements that all sources have. */
static uint64_t items_done(const struct fold *fold) {
    return atomic_load_explicit(&fold->cell->watermark, memory_order_relaxed) / fold->item_bytes;
}

static uint64_t items_there(const struct fold *fold) {
    uint64_t least = UINT64_MAX;
    for (size_t i = 0; i < fold->source_count; i++) {
        const struct fold_source *source = &fold->sources[i];
        const uint64_t items =
            atomic_load_explicit(&source->cell->watermark, memory_order_relaxed) /
            source->item_bytes;
        if (items < least) least = items;
    }
    return least;
}

/* A step ends at the end of a block of the cell, or at FOLD_BYTES_MAX, counted from the cell's
 * beginning, so the possible watermarks of a fold do not depend on the arrival of its sources. */
static uint64_t goal(const struct fold *fold) {
    const struct cell *cell = fold->cell;
    const uint64_t most = FOLD_BYTES_MAX;
    const uint64_t step = cell->block_bytes < most ? cell->block_bytes : most;
    const uint64_t watermark = atomic_load_explicit(&cell->watermark, memory_order_relaxed);
    const uint64_t end = (watermark / step + 1) * step;
    return end < cell->nbytes ? end : cell->nbytes;
}
_Static_assert(FOLD_BYTES_MAX % REDUCE_LINE_BYTES == 0, "whole elements, as blocks are");

/* Queues the fold if its next step is possible. */
void fold_look(struct engine *engine, struct fold *fold) {
    if (chain_empty(&fold->in_ready) && items_there(fold) >= goal(fold) / fold->item_bytes)
        chain_append(&engine->folds, &fold->in_ready);
}

/* ---- Arithmetic -------------------------------------------------------------------------------- */
static void first_source(const struct fold *fold, void *accumulator, const char *from,
                         size_t units) {
    if (fold->sources[0].accumulated)
        memcpy(accumulator, from, units * fold->kernel->accumulator_bytes);
    else if (fold->kernel->widen)
        fold->kernel->widen(accumulator, from, units);
    else
        memcpy(accumulator, from, units * fold->kernel->source_bytes);
}

static void next_source(const struct fold *fold, size_t i, void *accumulator, const char *from,
                        size_t units) {
    reduce_pair_fn *stage =
        fold->sources[i].accumulated ? fold->fold_accumulated : fold->kernel->fold;
    stage(accumulator, from, units);
}

/* A block that fits into the first-level cache: `items` elements from element `at`. */
static void fold_block(const struct fold *fold, uint64_t at, size_t items) {
    _Alignas(REDUCE_LINE_BYTES) char accumulator[REDUCE_BLOCK_BYTES];
    _Alignas(REDUCE_LINE_BYTES) char narrowed[REDUCE_BLOCK_BYTES / 2];
    const struct reduce_kernel *kernel = fold->kernel;
    const size_t units = items * kernel->lanes;
    for (size_t i = 0; i < fold->source_count; i++) {
        const struct fold_source *source = &fold->sources[i];
        const char *from = source->cell->bytes + at * source->item_bytes;
        if (i)
            next_source(fold, i, accumulator, from, units);
        else
            first_source(fold, accumulator, from, units);
    }
    if (fold->divisor > 1 && kernel->divide) kernel->divide(accumulator, units, fold->divisor);
    const bool narrow = fold->final && kernel->narrow;
    if (narrow) kernel->narrow(narrowed, accumulator, units);
    memcpy(fold->cell->bytes + at * fold->item_bytes, narrow ? narrowed : accumulator,
           items * fold->item_bytes);
}

/* An undivided single input is copied, as in reduce_run: its bits stay, even a NaN's. */
static bool is_copy(const struct fold *fold) {
    return fold->source_count == 1 && fold->divisor <= 1 &&
           fold->sources[0].accumulated != fold->final &&
           (!fold->kernel->widen || fold->kernel->narrow || !fold->final);
}

/* One step. fold_look has checked that it is possible, and watermarks only rise. */
void fold_step(struct engine *engine, struct fold *fold) {
    struct cell *cell = fold->cell;
    const uint64_t done = items_done(fold), end = goal(fold) / fold->item_bytes;
    const uint64_t block = REDUCE_BLOCK_BYTES / fold->kernel->accumulator_bytes / fold->kernel->lanes;
    if (is_copy(fold))
        memcpy(cell->bytes + done * fold->item_bytes,
               fold->sources[0].cell->bytes + done * fold->item_bytes,
               (end - done) * fold->item_bytes);
    else
        for (uint64_t at = done; at < end; at += block)
            fold_block(fold, at, end - at < block ? end - at : block);
    chain_remove(&fold->in_ready);
    cell_raise(engine, cell, end * fold->item_bytes);
    if (end * fold->item_bytes == cell->nbytes)
        fold_end(fold);
    else
        fold_look(engine, fold);
}
