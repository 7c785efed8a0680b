/* Spans of a living client that the node takes away, by threads in place of processes, for
 * ThreadSanitizer: `make tsan`.
 *
 * A lessee cuts blocks without asking anybody while the node looks whether any is in use. Here
 * lessees allocate, write, read and free; the node takes empty spans, overwrites them and leases
 * them to whoever has none. A block of a span that was taken is seen by its bytes.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>

#include "shm_spans.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { SLOTS = 3, PLACES = 4, SPAN = 4096, SMALL = 512, HELD = 8, TURNS = 20000 };

static char *c, *store;
static uint32_t owners[PLACES + 1]; /* of the span there: slot, 0: nobody */
static uint32_t wanted[SLOTS + 1];  /* that client waits for a span */
static uint64_t given[SLOTS + 1];
static uint32_t ended;
static long taken, cut;

static void check(int holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "race_spans: %s\n", what);
    abort();
}

/* Atomic: the node's look may see bytes of a block where there was a head; it does not count then. */
static void fill(uint64_t at, uint64_t bytes, char mark) {
    for (uint64_t k = 0; k < bytes; k++)
        __atomic_store_n(&store[at + k], mark, __ATOMIC_RELAXED);
}

static void *lessee(void *argument) {
    const unsigned slot = (unsigned)(uintptr_t)argument;
    unsigned dice = slot * 7919;
    span_heap h;
    heap_init(&h, SPAN, SMALL, spans_of(c));
    struct {
        uint64_t at, bytes;
        char mark;
    } held[HELD] = {0};
    for (int turn = 0; turn < TURNS; turn++) {
        dice = dice * 1103515245 + 12345;
        unsigned i = dice >> 16 & 0xFF;
        if (turn % 32 > 20) { /* now and then it lets everything go */
            for (i = 0; i < HELD && !held[i].at; i++)
                ;
            if (i == HELD)
                continue;
        }
        i %= HELD;
        if (held[i].at) {
            for (uint64_t k = 0; k < held[i].bytes; k++)
                check(LOAD(&store[held[i].at + k]) == held[i].mark,
                      "a block is somebody else's, too");
            shm_block *b = block_of(store, held[i].at);
            check(CAS64(&b->owner, BLOCK_LEASED, 0), "a block has another owner");
            heap_free(&h, held[i].at);
            held[i].at = 0;
            continue;
        }
        held[i].bytes = 1 + (dice >> 8) % SMALL;
        held[i].mark = (char)(dice >> 3 | 1);
        held[i].at = heap_allocate(&h, c, store, slot, held[i].bytes);
        if (!held[i].at) {
            STORE(&wanted[slot], 1);
            for (int looks = 0; looks < 10000 && LOAD(&wanted[slot]); looks++)
                ;
            if (!SWAP(&wanted[slot], 0)) /* else nobody has answered */
                check(heap_add(&h, given[slot]) == 0, "no memory");
            continue;
        }
        fill(held[i].at, held[i].bytes, held[i].mark);
        ADD(&cut, 1);
    }
    heap_clear(&h);
    ADD(&ended, 1);
    return NULL;
}

static void *node(void *unused) {
    (void)unused;
    for (unsigned at = 1; LOAD(&ended) < SLOTS; at = at % PLACES + 1) {
        const uint64_t base = (uint64_t)at * SPAN;
        if (at == PLACES)
            sched_yield();
        if (owners[at] && span_revoke(spans_of(c), store, SPAN, base)) {
            fill(base, SPAN, -1);
            owners[at] = 0;
            ADD(&taken, 1);
        }
        for (unsigned slot = 1; slot <= SLOTS && !owners[at]; slot++) {
            if (LOAD(&wanted[slot]) != 1)
                continue;
            uint64_t *word = &spans_of(c)[at];
            STORE(word, SPAN_NEXT(LOAD(word), 0) | SPAN_FIXED);
            given[slot] = base;
            uint32_t one = 1;
            if (__atomic_compare_exchange_n(&wanted[slot], &one, 0, 0, __ATOMIC_SEQ_CST,
                                            __ATOMIC_SEQ_CST))
                owners[at] = slot;
        }
    }
    return NULL;
}

int main(void) {
    char *mapped = mmap(NULL, PRIVATE_BYTES + CONTROL_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(mapped != MAP_FAILED, "no memory");
    c = mapped + PRIVATE_BYTES;
    store = aligned_alloc(SPAN, (PLACES + 1) * SPAN);
    memset(store, 0, (PLACES + 1) * SPAN);
    pthread_t threads[SLOTS + 1];
    int n = 0;
    pthread_create(&threads[n++], NULL, node, NULL);
    for (int i = 1; i <= SLOTS; i++)
        pthread_create(&threads[n++], NULL, lessee, (void *)(uintptr_t)i);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    check(taken > SLOTS && cut > TURNS / 4, "some of it has never happened");
    printf("race_spans: as it should be; %ld blocks, %ld spans taken\n", cut, taken);
    return 0;
}
