/* The results of small calls: compares, folds or gathers their parts, and records them.
 *
 * Every node computes the same result, so none is sent. The protocol is in engine_coll.c.
 */
#include "engine_coll.h"

#include <string.h>

#include "reduce_kernels.h"

enum { RECORD_ALIGN = 64 };

static uint64_t bit(uint32_t rank) { return 1ull << rank; }

static bool folds(uint8_t kind) {
    return kind == CALL_ALLREDUCE || kind == CALL_REDUCE || kind == CALL_REDUCE_SCATTER;
}

static bool is_rooted(uint8_t kind) {
    return kind == CALL_REDUCE || kind == CALL_BROADCAST || kind == CALL_GATHER;
}

struct found {
    struct coll_part part[MEMBERS];
    const char *bytes[MEMBERS];
    uint64_t ranks;
};

/* False: a duplicate rank, or a rank of another node. The lengths were checked on receipt. */
static bool find_parts(const struct coll_group *group, const struct coll_node *node,
                       struct found *found) {
    const struct coll_slot *slot = &node->slots[group->call & 1];
    for (uint32_t at = 0; at < slot->nbytes;) {
        struct coll_part part;
        memcpy(&part, slot->parts + at, sizeof part);
        at += sizeof part;
        if (part.rank >= group->size || found->ranks & bit(part.rank) ||
            group->node_of[part.rank] != node->number)
            return false;
        found->ranks |= bit(part.rank);
        found->part[part.rank] = part;
        found->bytes[part.rank] = slot->parts + at;
        at += part.nbytes;
    }
    return true;
}

static uint32_t first_rank(uint64_t ranks) { return (uint32_t)__builtin_ctzll(ranks); }

static const struct reduce_kernel *kernel_of(const struct coll_part *part) {
    const struct reduce_kernel *kernel = reduce_kernel_find(part->op, part->dtype);
    if (!kernel || reduce_source_bytes(kernel) != reduce_result_bytes(kernel)) return NULL;
    const uint32_t elements = part->nbytes - part->offset;
    return elements % reduce_source_bytes(kernel) ? NULL : kernel;
}

/* Whether all parts belong to one call that has a result. If not, Python makes the error. */
static bool agree(const struct coll_group *group, const struct found *found) {
    if (found->ranks != group->ranks) return false;
    const uint32_t lowest = first_rank(group->ranks);
    const struct coll_part *first = &found->part[lowest];
    if (first->kind >= CALL_KIND_COUNT) return false;
    if (is_rooted(first->kind) && (first->root >= group->size || !(group->ranks & bit(first->root))))
        return false;
    if (folds(first->kind) && !kernel_of(first)) return false;
    uint64_t total = 0;
    for (uint32_t rank = lowest; rank < group->size; rank++) {
        if (!(group->ranks & bit(rank))) continue;
        const struct coll_part *part = &found->part[rank];
        if (part->kind != first->kind || part->op != first->op || part->root != first->root)
            return false;
        if (folds(first->kind) &&
            (part->dtype != first->dtype || part->nbytes != first->nbytes ||
             part->offset != first->offset ||
             memcmp(found->bytes[rank], found->bytes[lowest], first->offset)))
            return false;
        total += (part->nbytes + RECORD_ALIGN - 1) / RECORD_ALIGN * RECORD_ALIGN;
    }
    return total <= COLL_BYTES_MAX &&
           (first->kind != CALL_BROADCAST || found->part[first->root].nbytes);
}

/* The same bits as reduce_arrays in Python: the same kernels, in the order of ranks. */
static void fold(const struct coll_group *group, const struct found *found, char *into) {
    const uint32_t lowest = first_rank(group->ranks);
    const struct coll_part *first = &found->part[lowest];
    const void *sources[MEMBERS];
    size_t count = 0;
    for (uint32_t rank = lowest; rank < group->size; rank++)
        if (group->ranks & bit(rank)) sources[count++] = found->bytes[rank] + first->offset;
    memcpy(into, found->bytes[lowest], first->offset);
    const struct reduce_kernel *kernel = kernel_of(first);
    const size_t elements = (first->nbytes - first->offset) / reduce_source_bytes(kernel);
    if (elements) reduce_run(kernel, sources, count, into + first->offset, elements, 1);
}

static void record(struct coll_group *group, const struct found *found) {
    const uint32_t lowest = first_rank(group->ranks);
    const struct coll_part *first = &found->part[lowest];
    struct coll_record *head = (struct coll_record *)group->last;
    struct coll_place *places = (struct coll_place *)(head + 1);
    *head = (struct coll_record){
        .call = group->call,
        .ranks = group->ranks,
        .kind = first->kind,
        .op = first->op,
        .dtype = first->dtype,
        .root = first->root,
    };
    uint64_t sources = group->ranks;
    if (folds(first->kind)) sources = bit(lowest);
    if (first->kind == CALL_BROADCAST) sources = bit(first->root);
    if (first->kind == CALL_BARRIER) sources = 0;
    uint32_t at = sizeof *head + (uint32_t)__builtin_popcountll(sources) * sizeof *places;
    for (; sources; sources &= sources - 1) {
        const uint32_t rank = first_rank(sources);
        const struct coll_part *part = &found->part[rank];
        at = (at + RECORD_ALIGN - 1) / RECORD_ALIGN * RECORD_ALIGN;
        places[head->count++] = (struct coll_place){rank, part->nbytes, at, 0};
        if (folds(first->kind))
            fold(group, found, group->last + at);
        else if (part->nbytes)
            memcpy(group->last + at, found->bytes[rank], part->nbytes);
        at += part->nbytes;
    }
    head->nbytes = at;
    group->has_last = true;
}

bool coll_combine(struct coll_group *group) {
    struct found found = {.ranks = 0};
    bool fits = find_parts(group, &group->own, &found);
    for (struct coll_node *node = group->others; node && fits; node = node->next)
        if (coll_takes_part(group, node->number)) fits = find_parts(group, node, &found);
    if (!fits || !agree(group, &found)) return false;
    record(group, &found);
    return true;
}
