/* A client's private allocator: small blocks cut from leased spans.
 *
 * Small objects are written without requests. Everything here is private to the process, except for
 * the owner words in block heads, which others may clear (return_block). When the process dies the
 * node needs none of it, because it reads only headers.
 */
#ifndef HOPLITE_SHM_SPANS_H
#define HOPLITE_SHM_SPANS_H

#include "shm_object.h"

#include <stdlib.h>

enum { CLASSES_MAX = 32, UNITS_MAX = 65536 /* of a span: numbers of 16 bits */ };

typedef struct {
    uint64_t base;
    uint32_t cls;      /* class + 1; 0 = empty, may take any class */
    uint32_t blocks;   /* that fit */
    uint32_t bump;     /* blocks ever cut */
    uint32_t free;     /* on the stack */
    uint32_t listed;   /* is in available[] */
    uint64_t word;     /* a copy of the shared word, unless the node has taken the span */
    uint16_t *stack;
} span;

/* A span's shared word: | changes 46 | blocks ever cut 17 | fixed 1 |. Its lessee counts each block
 * that it takes, and fixes the word while it writes the head. The node takes a span by the same
 * CAS, after it has seen that no block is in use. A span is leased and returned with its word
 * fixed, so it cannot be taken in transit. */
#define SPAN_FIXED 1ULL
#define SPAN_BLOCKS(w) ((w) >> 1 & 0x1FFFF)
#define SPAN_NEXT(w, blocks) ((((w) >> 18) + 1) << 18 | (uint64_t)(blocks) << 1)

typedef struct {
    span *spans;
    uint32_t count, room;
    uint64_t span_bytes;
    uint64_t small_max;         /* payload bytes of the largest small object */
    uint64_t *words;            /* of spans, by their number */
    uint32_t classes;
    uint64_t class_bytes[CLASSES_MAX];
    uint32_t *available[CLASSES_MAX]; /* stacks of span indices that may have a block */
    uint32_t available_count[CLASSES_MAX], available_room[CLASSES_MAX];
} span_heap;

static inline void heap_init(span_heap *h, uint64_t span_bytes, uint64_t small_max,
                             uint64_t *words) {
    memset(h, 0, sizeof *h);
    h->words = words;
    h->span_bytes = span_bytes;
    h->small_max = small_max;
    uint64_t last = small_max + BLOCK_ALIGN;
    for (uint64_t b = 128; h->classes < CLASSES_MAX - 2 && b < last; b *= 2) {
        h->class_bytes[h->classes++] = b; /* 128 192 256 384 512 768 ... */
        if (b + b / 2 < last)
            h->class_bytes[h->classes++] = b + b / 2;
    }
    h->class_bytes[h->classes++] = (last + 63) & ~63ULL;
}
static inline void heap_clear(span_heap *h) {
    for (uint32_t i = 0; i < h->count; i++)
        free(h->spans[i].stack);
    for (int i = 0; i < CLASSES_MAX; i++)
        free(h->available[i]);
    free(h->spans);
    memset(h, 0, sizeof *h);
}
static inline int heap_list(span_heap *h, uint32_t s) {
    uint32_t cls = h->spans[s].cls - 1;
    if (h->spans[s].listed)
        return 0;
    if (h->available_count[cls] == h->available_room[cls]) {
        uint32_t room = h->available_room[cls] ? 2 * h->available_room[cls] : 8;
        void *p = realloc(h->available[cls], room * sizeof(uint32_t));
        if (!p)
            return -1;
        h->available[cls] = p;
        h->available_room[cls] = room;
    }
    h->available[cls][h->available_count[cls]++] = s;
    h->spans[s].listed = 1;
    return 0;
}
static inline int heap_find(span_heap *h, uint64_t payload) {
    uint64_t base = payload & ~(h->span_bytes - 1); /* spans are aligned to their size */
    for (uint32_t i = base ? h->count : 0; i-- > 0;) /* base 0: an entry without a span */
        if (h->spans[i].base == base)
            return (int)i;
    return -1;
}
/* A span without any block in use may change its class, or be returned. */
static inline void heap_empty(span_heap *h, uint32_t i) {
    span *s = &h->spans[i];
    uint32_t cls = s->cls - 1, *list = h->available[cls], n = h->available_count[cls];
    for (uint32_t k = 0; k < n; k++)
        if (list[k] == i) {
            list[k] = list[n - 1];
            h->available_count[cls] = n - 1;
            break;
        }
    free(s->stack);
    s->stack = NULL;
    s->cls = s->blocks = s->bump = s->free = s->listed = 0;
}
/* NULL: a span that cannot be taken. */
static inline uint64_t *heap_word(span_heap *h, uint32_t i) {
    uint64_t at = h->spans[i].base / h->span_bytes;
    return at < SPANS ? &h->words[at] : NULL;
}
/* The node has taken it: none of it is in use, and none of it may be touched. */
static inline void heap_forget(span_heap *h, uint32_t i) {
    if (h->spans[i].cls)
        heap_empty(h, i);
    h->spans[i].base = 0;
}
/* Fixes the word of a span before a block is used, or before its return; 0: it was taken. */
static inline int heap_fix(span_heap *h, uint32_t i) {
    span *s = &h->spans[i];
    uint64_t *word = heap_word(h, i), next = SPAN_NEXT(s->word, s->bump);
    if (word && !CAS64(word, s->word, next | SPAN_FIXED)) {
        heap_forget(h, i);
        return 0;
    }
    s->word = next;
    return 1;
}
static inline void heap_unfix(span_heap *h, uint32_t i) {
    uint64_t *word = heap_word(h, i);
    if (word)
        STORE(word, h->spans[i].word);
}
static inline int heap_add(span_heap *h, uint64_t base) {
    int stale = heap_find(h, base); /* it was taken, and leased to this client again */
    if (stale >= 0)
        heap_forget(h, (uint32_t)stale);
    uint32_t at = h->count;
    for (uint32_t i = 0; i < h->count; i++)
        if (h->spans[i].base == 0) {
            at = i;
            break;
        }
    if (at == h->room) {
        uint32_t room = h->room ? 2 * h->room : 8;
        void *p = realloc(h->spans, room * sizeof(span));
        if (!p)
            return -1;
        h->spans = p;
        h->room = room;
    }
    if (at == h->count)
        h->count++;
    memset(&h->spans[at], 0, sizeof(span));
    h->spans[at].base = base;
    if (heap_word(h, at)) {
        h->spans[at].word = LOAD(heap_word(h, at)) & ~SPAN_FIXED;
        heap_unfix(h, at);
    }
    return 0;
}
static inline void heap_free(span_heap *h, uint64_t payload) {
    int i = heap_find(h, payload);
    if (i < 0 || !h->spans[i].cls)
        return;
    span *s = &h->spans[i];
    uint64_t at = (payload - BLOCK_ALIGN - s->base) / h->class_bytes[s->cls - 1];
    assert(at < s->bump && s->free < s->bump);
    s->stack[s->free++] = (uint16_t)at;
    heap_list(h, (uint32_t)i);
    if (s->free == s->bump && h->available_count[s->cls - 1] > 1)
        heap_empty(h, (uint32_t)i);
}
/* Finds blocks whose owner word another process has cleared. A cut block that is not on the stack
 * has a nonzero owner while it is in use: the lessee sets LEASED before it hands the block out. */
static inline void heap_reclaim(span_heap *h, char *store) {
    for (uint32_t i = 0; i < h->count; i++) {
        span *s = &h->spans[i];
        if (!s->base || !s->cls)
            continue;
        if (heap_word(h, i) && LOAD(heap_word(h, i)) != s->word) {
            heap_forget(h, i);
            continue;
        }
        uint64_t step = h->class_bytes[s->cls - 1];
        uint8_t *on_stack = calloc(s->bump + 1, 1);
        if (!on_stack)
            return;
        uint32_t bump = s->bump;
        for (uint32_t k = 0; k < s->free; k++)
            on_stack[s->stack[k]] = 1;
        for (uint32_t k = 0; k < bump && s->cls; k++) {
            uint64_t payload = s->base + k * step + BLOCK_ALIGN;
            if (!on_stack[k] && LOAD(&block_of(store, payload)->owner) == 0)
                heap_free(h, payload);
        }
        free(on_stack);
    }
}
static inline uint64_t heap_take(span_heap *h, uint32_t cls, uint32_t *from) {
    while (h->available_count[cls]) {
        uint32_t i = h->available[cls][h->available_count[cls] - 1];
        span *s = &h->spans[i];
        *from = i;
        if (s->free)
            return s->base + s->stack[--s->free] * h->class_bytes[cls] + BLOCK_ALIGN;
        if (s->bump < s->blocks)
            return s->base + s->bump++ * h->class_bytes[cls] + BLOCK_ALIGN;
        s->listed = 0;
        h->available_count[cls]--;
    }
    for (uint32_t i = 0; i < h->count; i++) {
        span *s = &h->spans[i];
        if (s->cls && s->free == s->bump)
            heap_empty(h, i); /* kept for objects of another class */
        if (!s->base || s->cls)
            continue;
        uint64_t blocks = h->span_bytes / h->class_bytes[cls];
        s->blocks = (uint32_t)(blocks < UNITS_MAX ? blocks : UNITS_MAX);
        if (!s->blocks)
            return 0;
        s->stack = malloc(s->blocks * sizeof(uint16_t));
        if (!s->stack)
            return 0;
        s->cls = cls + 1;
        s->bump = 1;
        if (heap_list(h, i) < 0)
            return 0;
        *from = i;
        return s->base + BLOCK_ALIGN;
    }
    return 0;
}
/* The same for a span that is still this client's; its word is fixed. */
static inline uint64_t heap_take_fixed(span_heap *h, uint32_t cls, uint32_t *from) {
    uint64_t payload;
    do
        payload = heap_take(h, cls, from);
    while (payload && !heap_fix(h, *from));
    return payload;
}
/* Payload offset of a LEASED block; 0: another span is needed. */
static inline uint64_t heap_allocate(span_heap *h, char *c, char *store, unsigned slot,
                                     uint64_t nbytes) {
    uint32_t cls = 0;
    while (cls < h->classes && h->class_bytes[cls] < nbytes + BLOCK_ALIGN)
        cls++;
    if (cls == h->classes)
        return 0;
    uint32_t from = 0;
    uint64_t payload = heap_take_fixed(h, cls, &from);
    if (!payload && SWAP(&client_of(c, slot)->returned, 0)) {
        heap_reclaim(h, store);
        payload = heap_take_fixed(h, cls, &from);
    }
    if (!payload)
        return 0;
    shm_block *b = block_of(store, payload);
    __atomic_store_n(&b->bytes, h->class_bytes[cls], __ATOMIC_RELAXED); /* the node may read it */
    b->lessee = slot;
    b->big = 0;
    b->generation = client_of(c, slot)->generation;
    STORE(&b->owner, BLOCK_LEASED);
    heap_unfix(h, from);
    return payload;
}
/* Also removes the last span of a class, which heap_free() keeps for the next object. */
static inline int heap_remove_empty(span_heap *h, uint64_t *bases, int max) {
    int n = 0;
    for (uint32_t i = 0; i < h->count && n < max; i++) {
        if (h->spans[i].cls && h->spans[i].free == h->spans[i].bump)
            heap_empty(h, i);
        if (h->spans[i].base && !h->spans[i].cls && heap_fix(h, i)) {
            bases[n++] = h->spans[i].base;
            h->spans[i].base = 0;
        }
    }
    return n;
}
/* Whether no block of a span is in use. The lessee may change it meanwhile, so the answer is only
 * valid if the span's word is the same afterwards. */
static inline int span_looks_empty(char *store, uint64_t base, uint64_t blocks,
                                   uint64_t span_bytes) {
    uint64_t step = blocks ? LOAD(&block_of(store, base + BLOCK_ALIGN)->bytes) : 0;
    if (blocks && (!step || blocks * step > span_bytes))
        return 0;
    for (uint64_t k = 0; k < blocks; k++)
        if (LOAD(&block_of(store, base + k * step + BLOCK_ALIGN)->owner))
            return 0;
    return 1;
}
/* For the node: takes a span from another lessee, if no block is in use. */
static inline int span_revoke(uint64_t *words, char *store, uint64_t span_bytes, uint64_t base) {
    uint64_t at = base / span_bytes;
    if (at >= SPANS)
        return 0;
    uint64_t w = LOAD(&words[at]);
    return !(w & SPAN_FIXED) && span_looks_empty(store, base, SPAN_BLOCKS(w), span_bytes) &&
           CAS64(&words[at], w, SPAN_NEXT(w, 0));
}
#endif
