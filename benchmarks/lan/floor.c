/* What this machine needs at least for a collective over sockets: the floor of processor time.
 *
 * The bound of a benchmark over emulated hosts is that of the links, but all hosts share a few
 * cores, and the kernel alone needs much of them. This program moves the same bytes over the same
 * flows as the library does (stripes, relays, folds in the order of ranks, block by block), with
 * plain sockets, one thread and nothing else: no framing, no agreement, no checksum, no copy, no
 * faults. Its processor time is a lower bound for every library that uses TCP on this machine.
 *
 *     floor ADDRESS,ADDRESS,... SIZE RANK kind:bytes:rounds...
 *
 * prints one line of JSON: of each row the seconds of each round on this rank, and on rank 0 under
 * "ROW cpu" the processor time of the whole machine.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { RANKS = 32, CHANNELS = 3, CONTROL = 0, PARTS = 1, RESULTS = 2, PORT = 7997, ROUNDS = 256 };
enum { BLOCK = 256 << 10, FOLD = 32 << 10, GOES = 1, COMES = 2 };

/* Bytes of one connection in one direction. Of those that go, `*ready` may be sent. */
typedef struct {
    int fd, blocked;
    char *at;
    size_t bytes, done;
    size_t *ready;
} flow;

static int size, rank, sockets[RANKS][CHANNELS], epoll_fd;
static flow goes[2 * RANKS], comes[2 * RANKS];
static int goes_count, comes_count;
static size_t all_ready = SIZE_MAX;

static void fail(const char *what) {
    fprintf(stderr, "rank %d: %s: %s\n", rank, what, strerror(errno));
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Of all cores of the machine, since it was started. */
static double processor_s(void) {
    unsigned long long found[8] = {0};
    FILE *file = fopen("/proc/stat", "r");
    if (!file || fscanf(file, "cpu %llu %llu %llu %llu %llu %llu %llu", found, found + 1, found + 2,
                        found + 3, found + 4, found + 5, found + 6) != 7)
        fail("/proc/stat");
    fclose(file);
    return (double)(found[0] + found[1] + found[2] + found[5] + found[6]) /
           (double)sysconf(_SC_CLK_TCK);
}

/* ---- connections: a lower rank is called by a higher one */

static void whole(int fd, void *data, size_t bytes, int go) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = go ? send(fd, (char *)data + done, bytes - done, MSG_NOSIGNAL)
                         : recv(fd, (char *)data + done, bytes - done, 0);
        if (got <= 0)
            fail(go ? "send" : "recv");
        done += (size_t)got;
    }
}

static void meet(char *addresses) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    struct sockaddr_in own = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(listener, (struct sockaddr *)&own, sizeof own) || listen(listener, RANKS * CHANNELS))
        fail("listen");
    char *address = strtok(addresses, ",");
    for (int to = 0; to < rank; to++, address = strtok(NULL, ","))
        for (int channel = 0; channel < CHANNELS; channel++) {
            struct sockaddr_in there = {.sin_family = AF_INET, .sin_port = htons(PORT)};
            inet_pton(AF_INET, address, &there.sin_addr);
            int fd, hello[2] = {rank, channel};
            for (double until = now() + 30;; usleep(20000)) {
                fd = socket(AF_INET, SOCK_STREAM, 0);
                if (!connect(fd, (struct sockaddr *)&there, sizeof there))
                    break;
                close(fd);
                if (now() > until)
                    fail(address);
            }
            whole(fd, hello, sizeof hello, 1);
            sockets[to][channel] = fd;
        }
    for (int left = (size - 1 - rank) * CHANNELS; left; left--) {
        int hello[2], fd = accept(listener, NULL, NULL);
        if (fd < 0)
            fail("accept");
        whole(fd, hello, sizeof hello, 0);
        sockets[hello[0]][hello[1]] = fd;
    }
    close(listener);
    for (int to = 0; to < size; to++)
        for (int channel = 0; to != rank && channel < CHANNELS; channel++)
            setsockopt(sockets[to][channel], IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

static void barrier(void) {
    char word = 0;
    for (int to = 1; !rank && to < size; to++)
        whole(sockets[to][CONTROL], &word, 1, 0);
    for (int to = 1; !rank && to < size; to++)
        whole(sockets[to][CONTROL], &word, 1, 1);
    if (rank) {
        whole(sockets[0][CONTROL], &word, 1, 1);
        whole(sockets[0][CONTROL], &word, 1, 0);
    }
}

/* ---- flows */

static void send_to(int to, int channel, char *at, size_t bytes, size_t *ready) {
    if (bytes)
        goes[goes_count++] = (flow){sockets[to][channel], 0, at, bytes, 0, ready};
}

static size_t *receive_from(int from, int channel, char *at, size_t bytes) {
    comes[comes_count] = (flow){sockets[from][channel], 0, at, bytes, 0, NULL};
    return &comes[comes_count++].done;
}

/* What one epoll call is told of a socket: both directions of it may be in use. */
static void watch(int op, int channel, int peer, unsigned events) {
    struct epoll_event event = {.events = events, .data.u32 = (uint32_t)(channel * RANKS + peer)};
    if (epoll_ctl(epoll_fd, op, sockets[peer][channel], &event))
        fail("epoll_ctl");
}

static flow *flow_of(flow *all, int count, int fd) {
    for (int i = 0; i < count; i++)
        if (all[i].fd == fd && all[i].done < all[i].bytes)
            return &all[i];
    return NULL;
}

static int push(flow *f) {
    size_t ready = f->ready == &all_ready ? f->bytes : *f->ready;
    int moved = 0;
    while (!f->blocked && f->done < ready) {
        ssize_t got = send(f->fd, f->at + f->done, ready - f->done, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (got > 0)
            f->done += (size_t)got, moved = 1;
        else if (errno == EAGAIN)
            f->blocked = 1;
        else
            fail("send");
    }
    return moved;
}

static void pull(flow *f) {
    while (f->done < f->bytes) {
        size_t left = f->bytes - f->done;
        ssize_t got = recv(f->fd, f->at + f->done, left < BLOCK ? left : BLOCK, MSG_DONTWAIT);
        if (got > 0)
            f->done += (size_t)got;
        else if (got < 0 && errno == EAGAIN)
            return;
        else
            fail("recv");
        if ((size_t)got < BLOCK)
            return;
    }
}

/* ---- the fold of one stripe, in the order of ranks */

typedef struct {
    float *into, *from[RANKS];
    size_t bytes, done;
    size_t *come[RANKS]; /* how much of each; NULL: it is this rank's own */
} folding;

static void fold(folding *f) {
    size_t ready = f->bytes;
    for (int r = 0; r < size; r++)
        if (f->come[r] && *f->come[r] < ready)
            ready = *f->come[r];
    if (ready < f->bytes)
        ready -= ready % FOLD;
    while (f->done < ready) {
        size_t end = f->done + FOLD < ready ? f->done + FOLD : ready;
        float *restrict into = f->into + f->done / 4;
        size_t count = (end - f->done) / 4;
        for (int r = 1; r < size; r++) {
            const float *restrict other = f->from[r] + f->done / 4;
            const float *first = r == 1 ? f->from[0] + f->done / 4 : into;
            for (size_t i = 0; i < count; i++)
                into[i] = first[i] + other[i];
        }
        f->done = end;
    }
}

/* ---- one call */

static size_t begin_of(size_t bytes, int stripe, int stripes) {
    return bytes / 4 * (size_t)stripe / (size_t)stripes * 4;
}

static void run(folding *f) {
    unsigned wanted[CHANNELS][RANKS] = {{0}}, now_watched[CHANNELS][RANKS] = {{0}};
    for (;;) {
        if (f)
            fold(f);
        int left = f && f->done < f->bytes;
        memset(wanted, 0, sizeof wanted);
        for (int i = 0; i < goes_count; i++) {
            flow *g = &goes[i];
            push(g);
            left |= g->done < g->bytes;
        }
        for (int i = 0; i < comes_count; i++)
            left |= comes[i].done < comes[i].bytes;
        if (!left)
            break;
        for (int channel = PARTS; channel < CHANNELS; channel++)
            for (int peer = 0; peer < size; peer++) {
                if (peer == rank)
                    continue;
                flow *g = flow_of(goes, goes_count, sockets[peer][channel]);
                flow *c = flow_of(comes, comes_count, sockets[peer][channel]);
                unsigned events = (g && g->blocked ? EPOLLOUT : 0u) | (c ? EPOLLIN : 0u);
                unsigned before = now_watched[channel][peer];
                if (c) { /* not to be woken for each packet */
                    size_t rest = c->bytes - c->done;
                    int low = (int)(rest < BLOCK / 4 ? rest : BLOCK / 4);
                    setsockopt(c->fd, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
                }
                if (events != before)
                    watch(!before ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL,
                          channel, peer, events);
                now_watched[channel][peer] = events;
            }
        struct epoll_event events[CHANNELS * RANKS];
        int count = epoll_wait(epoll_fd, events, CHANNELS * RANKS, -1);
        for (int i = 0; i < count; i++) {
            int fd = sockets[events[i].data.u32 % RANKS][events[i].data.u32 / RANKS];
            flow *g = flow_of(goes, goes_count, fd), *c = flow_of(comes, comes_count, fd);
            if (g && events[i].events & EPOLLOUT)
                g->blocked = 0;
            if (c && events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                pull(c);
        }
    }
    for (int channel = PARTS; channel < CHANNELS; channel++)
        for (int peer = 0; peer < size; peer++)
            if (now_watched[channel][peer])
                watch(EPOLL_CTL_DEL, channel, peer, 0);
}

/* Contributions to stripes go to their owners, which fold them. */
static void contribute(folding *f, float *mine, float *other, float *result, size_t bytes, int first) {
    int stripes = size - first;
    for (int owner = first; owner < size; owner++) {
        size_t begin = begin_of(bytes, owner - first, stripes);
        size_t end = begin_of(bytes, owner - first + 1, stripes);
        if (owner != rank) {
            send_to(owner, PARTS, (char *)mine + begin, end - begin, &all_ready);
            continue;
        }
        *f = (folding){.into = result + begin / 4, .bytes = end - begin};
        for (int r = 0, at = 0; r < size; r++) {
            f->from[r] = r == rank ? mine + begin / 4 : other + (size_t)at * (end - begin) / 4;
            if (r != rank) {
                f->come[r] = receive_from(r, PARTS, (char *)f->from[r], end - begin);
                at++;
            }
        }
    }
}

static void call(const char *kind, float *mine, float *other, float *result, size_t bytes) {
    folding folded = {0}, *f = NULL;
    goes_count = comes_count = 0;
    int spread = !strcmp(kind, "allreduce"), to_root = !strcmp(kind, "reduce");
    if (spread || to_root || !strcmp(kind, "reduce_scatter")) {
        int first = to_root && size > 1 ? 1 : 0, stripes = size - first;
        contribute(&folded, mine, other, result, bytes, first);
        f = rank >= first ? &folded : NULL;
        for (int owner = first; (spread || to_root) && owner < size; owner++) {
            size_t begin = begin_of(bytes, owner - first, stripes);
            size_t end = begin_of(bytes, owner - first + 1, stripes);
            for (int to = 0; to < (to_root ? 1 : size); to++)
                if (owner == rank && to != rank)
                    send_to(to, RESULTS, (char *)result + begin, end - begin, &folded.done);
            if (owner != rank && (spread || !rank))
                receive_from(owner, RESULTS, (char *)result + begin, end - begin);
        }
    } else if (!strcmp(kind, "broadcast")) {
        for (int owner = 1; owner < size; owner++) {
            size_t begin = begin_of(bytes, owner - 1, size - 1), *come = &all_ready;
            size_t end = begin_of(bytes, owner, size - 1);
            char *at = (char *)(rank ? result : mine) + begin;
            if (!rank)
                send_to(owner, PARTS, at, end - begin, come);
            else
                come = receive_from(owner == rank ? 0 : owner, owner == rank ? PARTS : RESULTS, at,
                                    end - begin);
            for (int to = 1; rank && owner == rank && to < size; to++)
                if (to != rank)
                    send_to(to, RESULTS, at, end - begin, come);
        }
    } else { /* gather, allgather: whole arrays, one after another in `other` */
        int all = !strcmp(kind, "allgather");
        for (int r = 0, at = 0; r < size; r++) {
            if (r == rank)
                continue;
            if (all || !r)
                send_to(r, PARTS, (char *)mine, bytes, &all_ready);
            if (all || !rank)
                receive_from(r, PARTS, (char *)other + (size_t)at++ * bytes, bytes);
        }
    }
    run(f);
}

/* ---- rows */

static float *fresh(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED)
        fail("mmap");
    return at;
}

static void check(const char *kind, const float *other, const float *result, size_t bytes) {
    float sum = (float)(size * (size + 1) / 2), want = !strcmp(kind, "broadcast") ? 1.0f : sum;
    size_t count = bytes / 4;
    if (!strcmp(kind, "gather") || !strcmp(kind, "allgather")) {
        for (int r = 0, at = 0; r < size; r++)
            if (r != rank && (kind[0] == 'a' || !rank) && other[(size_t)at++ * count] != (float)r + 1)
                fail("a wrong element was gathered");
        return;
    }
    size_t begin = 0, end = count;
    if (!strcmp(kind, "reduce_scatter"))
        begin = begin_of(bytes, rank, size) / 4, end = begin_of(bytes, rank + 1, size) / 4;
    if (rank && !strcmp(kind, "reduce"))
        return;
    for (size_t i = begin; i < end && (rank || want == sum); i++)
        if (result[i] != want)
            fail("a wrong element");
}

static void row(char *name, int last) {
    char kind[32];
    unsigned long long bytes;
    int rounds;
    if (sscanf(name, "%31[a-z_]:%llu:%d", kind, &bytes, &rounds) != 3 || rounds >= ROUNDS)
        fail(name);
    double seconds[ROUNDS], processor[ROUNDS];
    float *mine = fresh(bytes), *result = fresh(bytes), *other = fresh(bytes * (size_t)size);
    for (size_t i = 0; i < bytes / 4; i++)
        mine[i] = (float)rank + 1, result[i] = 0;
    memset(other, 0, bytes * (size_t)size); /* warm memory, as the library's store has it */
    for (int round = 0; round <= rounds; round++) { /* the first one warms up */
        barrier();
        double begun = now(), used = rank ? 0 : processor_s();
        call(kind, mine, other, result, bytes);
        seconds[round] = now() - begun;
        barrier();
        processor[round] = rank ? 0 : processor_s() - used;
        check(kind, other, result, bytes);
    }
    for (int which = 0; which < (rank ? 1 : 2); which++) {
        printf("\"%s%s\": [", name, which ? " cpu" : "");
        for (int round = 1; round <= rounds; round++)
            printf("%s%.6f", round > 1 ? ", " : "", (which ? processor : seconds)[round]);
        printf("]%s", last && which == (rank ? 0 : 1) ? "" : ", ");
    }
    munmap(mine, bytes), munmap(result, bytes), munmap(other, bytes * (size_t)size);
}

int main(int count, char **words) {
    if (count < 5)
        return 2;
    size = atoi(words[2]), rank = atoi(words[3]);
    if (size > RANKS || (epoll_fd = epoll_create1(0)) < 0)
        fail("epoll_create");
    meet(words[1]);
    printf("{");
    for (int i = 4; i < count; i++)
        row(words[i], i + 1 == count);
    printf("}\n");
    return 0;
}
