/* The store's file is closed while threads write through it, for ThreadSanitizer: `make tsan`.
 *
 * Threads use the descriptor until it is retired, which two others do at the same moment. Nobody
 * may find it closed between file_enter() and file_leave(), and it is closed once.
 */
#define _GNU_SOURCE
#include "shm_file.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { USERS = 3, CLOSERS = 2, ROUNDS = 500 };

static shm_file file;
static long used;

static void check(int holds, const char *what) {
    if (holds)
        return;
    fprintf(stderr, "race_file: %s\n", what);
    abort();
}

static void *use(void *unused) {
    while (file_enter(&file)) {
        check(file_is_ours(&file), "the file was closed while a thread used it");
        __atomic_fetch_add(&used, 1, __ATOMIC_RELAXED);
        file_leave(&file);
        sched_yield();
    }
    return unused;
}

static void *retire(void *round) {
    for (long i = 0; i < *(long *)round % 50; i++)
        sched_yield();
    file_retire(&file);
    return NULL;
}

int main(void) {
    int fd = memfd_create("race_file", MFD_CLOEXEC);
    for (long round = 0; round < ROUNDS; round++) {
        pthread_t threads[USERS + CLOSERS];
        check(fd >= 0 && !file_open(fd, &file), "cannot open");
        const int own = file.fd;
        for (int i = 0; i < USERS + CLOSERS; i++)
            check(!pthread_create(&threads[i], NULL, i < USERS ? use : retire, &round), "no thread");
        for (int i = 0; i < USERS + CLOSERS; i++)
            pthread_join(threads[i], NULL);
        check(file.fd == -1 && file.users == FILE_RETIRED, "the file is still in use");
        check(fcntl(own, F_GETFD) == -1, "the descriptor is still open");
    }
    printf("race_file: %d rounds, %ld uses\n", ROUNDS, used);
    return 0;
}
