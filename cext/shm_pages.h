/* Pages of the store: allocated in advance, on several cores.
 *
 * The first touch of fresh memory costs five times a copy. The kernel clears pages faster when many
 * are requested at a time, and nearly twice as fast on two cores.
 */
#ifndef HOPLITE_SHM_PAGES_H
#define HOPLITE_SHM_PAGES_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older kernels refuse it: allocated by touch */
#endif

enum { PAGES_THREADS_MAX = 4, PAGES_BYTES_MIN = 8 << 20, PAGE = 4096, PAGES_PIECE_BYTES = 256 << 10 };

typedef struct {
    char *begin;
    uint64_t bytes;
} pages_range;

static void *pages_populate_range(void *argument) {
    pages_range *r = argument;
    madvise(r->begin, r->bytes, MADV_POPULATE_WRITE);
    return NULL;
}
/* Maps and allocates [begin, begin + bytes), page-aligned; at most `cores` threads. */
static inline void pages_populate(char *begin, uint64_t bytes, unsigned cores) {
    pthread_t threads[PAGES_THREADS_MAX];
    pages_range ranges[PAGES_THREADS_MAX];
    unsigned n = cores < PAGES_THREADS_MAX ? cores : PAGES_THREADS_MAX, started = 0;
    if (n < 1 || bytes < PAGES_BYTES_MIN)
        n = 1;
    uint64_t share = (bytes / n + PAGE - 1) & ~(uint64_t)(PAGE - 1);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (unsigned i = 1; i < n; i++) {
        uint64_t at = i * share;
        if (at >= bytes)
            break;
        ranges[i].begin = begin + at;
        ranges[i].bytes = bytes - at < share ? bytes - at : share;
        if (pthread_create(&threads[started], NULL, pages_populate_range, &ranges[i]))
            pages_populate_range(&ranges[i]);
        else
            started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    ranges[0].begin = begin;
    ranges[0].bytes = bytes < share ? bytes : share;
    pages_populate_range(&ranges[0]);
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
}
/* Copies into pages that may be fresh: each piece is allocated just before it is written, while
 * clearing has left it in the cache. */
static inline void pages_copy(char *to, const char *from, uint64_t bytes) {
    while (bytes) {
        uint64_t begin = (uint64_t)to & ~(uint64_t)(PAGE - 1);
        uint64_t n = PAGES_PIECE_BYTES - ((uint64_t)to - begin);
        if (n > bytes)
            n = bytes;
        uint64_t end = ((uint64_t)to + n + PAGE - 1) & ~(uint64_t)(PAGE - 1);
        madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
        memcpy(to, from, n);
        to += n;
        from += n;
        bytes -= n;
    }
}
#endif
