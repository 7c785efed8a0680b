/* The life of objects in shared memory, by threads in place of processes, for ThreadSanitizer:
 * `make tsan`.
 *
 * What is no atomic word of a header (where its bytes are, the bytes) may be touched only by whom
 * the atomic words let in; across processes no tool sees who breaks that. Here an owner makes,
 * seals and collects, others pin and read, one deletes, the node moves bytes out and in.
 */
#define _GNU_SOURCE
#include <assert.h>
#include <stdint.h>

#include "shm_object.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { NODE = 0, OWNER = 1, READER = 2, READERS = 3, DELETER = 5, LIVES = 5000, BYTES = 256 };

static char *c, *store;
static uint64_t shown; /* the id that everybody tries */
static uint32_t over;
static char file[BYTES];
static long reads, moves, deletions;

static void check(int holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "race_shm: %s\n", what);
    abort();
}

static char *bytes_at(uint64_t payload) { return store + payload; }

static void *own(void *unused) {
    (void)unused;
    const uint64_t payload = BLOCK_ALIGN;
    shm_header *h = header_at(c, 0, 0);
    for (int life = 1; life <= LIVES; life++) {
        uint64_t w = LOAD(&h->word), id = ID_MAKE(0, 0, WORD_GENERATION(w));
        check(WORD_STATE(w) == ST_FREE, "a header that is used again is not free");
        OR(&h->refs[0], 1ULL << OWNER);
        check(change_state(c, id, ST_FREE, ST_CLAIMED, -1, OWNER), "cannot claim");
        STORE(&block_of(store, payload)->owner, id);
        memset(bytes_at(payload), life & 0x7f, BYTES);
        h->block = payload;
        h->size = BYTES;
        check(finish(c, id, OWNER, ST_SEALED), "cannot seal");
        STORE(&shown, id);
        for (int i = 0; i < life % 50; i++)
            sched_yield();
        release_bit(c, id, OWNER, 0);
        while (WORD_STATE(LOAD(&h->word)) != ST_FREED)
            sched_yield();
        if (h->block)
            return_block(c, store, h->block, id);
        h->block = 0;
        do
            w = LOAD(&h->word);
        while (!CAS64(&h->word, w,
                      WORD_ACQUIRE_ONE * (w / WORD_ACQUIRE_ONE) |
                          (ID_MAKE(0, 0, WORD_GENERATION(w) + 1) & 0xFFFFFFFULL) << 20 | ST_FREE));
    }
    STORE(&over, 1);
    return NULL;
}

static void *view(void *argument) {
    const unsigned slot = (unsigned)(uintptr_t)argument;
    while (!LOAD(&over)) {
        uint64_t id = LOAD(&shown), word;
        if (!id)
            continue;
        if (acquire_bit(c, id, slot, 1, &word) == ST_SEALED) {
            const char *bytes = bytes_at(header_of(c, id)->block);
            for (int i = 1; i < BYTES; i++)
                check(bytes[i] == bytes[0], "a reader sees a mixture");
            ADD(&reads, 1);
        }
        release_bit(c, id, slot, 1);
        sched_yield();
    }
    return NULL;
}

static void *delete(void *unused) {
    (void)unused;
    while (!LOAD(&over)) {
        for (int i = 0; i < 100; i++)
            sched_yield();
        if (LOAD(&shown) && delete_object(c, LOAD(&shown)) > 0)
            ADD(&deletions, 1);
    }
    return NULL;
}

/* As spill_begin, spill_end and restore of shm_node.pxi. */
static void *move(void *unused) {
    (void)unused;
    while (!LOAD(&over)) {
        uint64_t id = LOAD(&shown);
        shm_header *h = header_at(c, 0, 0);
        sched_yield();
        if (!id || !change_state(c, id, ST_SEALED, ST_SPILLING, -1, -1))
            continue;
        if (!mask_empty(h->pins)) {
            change_state(c, id, ST_SPILLING, ST_SEALED, -1, -1);
            try_free(c, id);
            continue;
        }
        const uint64_t payload = h->block;
        memcpy(file, bytes_at(payload), BYTES);
        memset(bytes_at(payload), -1, BYTES);
        h->block = 0;
        change_state(c, id, ST_SPILLING, ST_SPILLED, -1, -1);
        try_free(c, id);
        ADD(&moves, 1);
        if (!change_state(c, id, ST_SPILLED, ST_SPILLING, -1, -1))
            continue; /* it has gone meanwhile */
        memcpy(bytes_at(payload), file, BYTES);
        h->block = payload;
        change_state(c, id, ST_SPILLING, ST_SEALED, -1, -1);
        try_free(c, id);
    }
    return NULL;
}

int main(void) {
    char *mapped = mmap(NULL, PRIVATE_BYTES + CONTROL_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(mapped != MAP_FAILED, "no memory");
    c = mapped + PRIVATE_BYTES;
    store = aligned_alloc(BLOCK_ALIGN, BLOCK_ALIGN + BYTES);
    memset(store, 0, BLOCK_ALIGN + BYTES);
    block_of(store, BLOCK_ALIGN)->lessee = OWNER;
    STORE(&table_of(c, 0)->owner, OWNER + 1);
    header_at(c, 0, 0)->word = 1ULL << 20; /* FREE, generation 1 */
    pthread_t threads[READERS + 3];
    int n = 0;
    pthread_create(&threads[n++], NULL, own, NULL);
    for (int i = 0; i < READERS; i++)
        pthread_create(&threads[n++], NULL, view, (void *)(uintptr_t)(READER + i));
    pthread_create(&threads[n++], NULL, delete, NULL);
    pthread_create(&threads[n++], NULL, move, NULL);
    for (int i = 0; i < n; i++)
        pthread_join(threads[i], NULL);
    check(reads && moves && deletions, "some of it has never happened");
    printf("race_shm: as it should be; %ld reads, %ld moves, %ld deletions\n", reads, moves,
           deletions);
    return 0;
}
