/* The engine's threads without Python, for ThreadSanitizer: `make tsan`.
 *
 * An interpreter that is not instrumented would hide races and invent others. Here three engines
 * pull, relay and fold over plain and driven links, while other threads write cells, read behind
 * watermarks, take events, drive a link, and close cells half way.
 */
#include "engine_state.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { ENGINES = 3, ROUNDS = 40, WORDS = 100000, NBYTES = 4 * WORDS, PIECE = 40000, MOST = 4096 };
enum { PATIENCE_MS = 60000 };
static const double WAIT_S = 0.2;

static void check(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "race_engine: %s\n", what);
    abort();
}

/* ---- One host: an engine, what it has told, and the thread that hears it -------------------------- */
struct host {
    struct engine *engine;
    pthread_t hears;
    pthread_mutex_t lock; /* the next two */
    pthread_cond_t told;
    unsigned char filled[MOST], closed[MOST];
    atomic_bool over;
};

static void *hear(void *argument) {
    struct host *host = argument;
    while (!atomic_load(&host->over)) {
        struct pollfd wanted = {.fd = host->engine->event_fd, .events = POLLIN};
        poll(&wanted, 1, 20);
        for (struct event *event = engine_take(host->engine), *next; event; event = next) {
            next = event->next;
            pthread_mutex_lock(&host->lock);
            if (event->kind == EVENT_FILLED) host->filled[event->number] = 1;
            if (event->kind == EVENT_CLOSED) host->closed[event->number] = 1;
            pthread_cond_broadcast(&host->told);
            pthread_mutex_unlock(&host->lock);
            event_free(event);
        }
    }
    return NULL;
}

static void await(struct host *host, const unsigned char *flag) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    at.tv_sec += PATIENCE_MS / 1000;
    pthread_mutex_lock(&host->lock);
    while (!*flag)
        check(!pthread_cond_timedwait(&host->told, &host->lock, &at), "an event does not come");
    pthread_mutex_unlock(&host->lock);
}

static struct cell *open_cell(struct host *host, uint64_t number, void *bytes, uint64_t key) {
    const struct frame_key words = {.operation = key};
    struct cell *cell = cell_new(host->engine, number, bytes, NBYTES, 0, key ? &words : NULL);
    engine_post(host->engine, COMMAND_CELL, cell, NULL, NULL, NULL, 0);
    return cell;
}

static void pull(struct host *host, struct cell *cell, struct link *link, uint64_t key) {
    const struct frame_key words = {.operation = key};
    engine_post(host->engine, COMMAND_PULL, cell, link, NULL, &words, 0);
}

static void close_cell(struct host *host, struct cell *cell) {
    engine_post(host->engine, COMMAND_CLOSE, cell, NULL, NULL, NULL, 0);
    await(host, &host->closed[cell->number]);
    free(cell);
}

/* ---- Links ----------------------------------------------------------------------------------------- */
static struct link *connect_link(struct host *host, int fd) {
    struct link *link = link_new(1, 1, 0, false, true);
    check(!socket_take(link, fd), "no link");
    close(fd);
    engine_post(host->engine, COMMAND_CONNECT, NULL, link, NULL, NULL, 0);
    return link;
}

/* As the threads of TlsLink do it, over a socket that is not encrypted. */
struct driven {
    struct host *host;
    struct link *link;
    int out, in;
    pthread_t sends, receives;
    pthread_mutex_t lock; /* cells by number, as Python has them in a dictionary */
    struct cell *cells[MOST];
};

static char *bytes_of(struct driven *driven, uint64_t number) {
    pthread_mutex_lock(&driven->lock);
    struct cell *cell = driven->cells[number];
    pthread_mutex_unlock(&driven->lock);
    check(cell, "a cell that nobody knows");
    return cell->bytes;
}

static bool write_all(int fd, const char *bytes, size_t count) {
    for (ssize_t went; count; bytes += went, count -= (size_t)went)
        if ((went = send(fd, bytes, count, MSG_NOSIGNAL)) <= 0) return false;
    return true;
}

static void *drive_out(void *argument) {
    struct driven *driven = argument;
    struct engine *engine = driven->host->engine;
    struct frame frame;
    uint64_t cell;
    char reason[REASON_BYTES];
    int found;
    char *small;
    while (driven_enter(engine), (found = driven_wait_frame(engine, driven->link, WAIT_S, &frame,
                                                            &cell, &small, reason)) >= 0) {
        if (!found) continue;
        bool went = write_all(driven->out, (char *)&frame, FRAME_BYTES);
        if (went && frame.length)
            went = write_all(driven->out, bytes_of(driven, cell) + frame.offset, frame.length);
        if (!went) engine_post(engine, COMMAND_DISCONNECT, NULL, driven->link, NULL, NULL, 0);
        engine_post(engine, COMMAND_SENT, NULL, driven->link, NULL, NULL, 0);
    }
    shutdown(driven->out, SHUT_WR);
    return NULL;
}

static void *drive_in(void *argument) {
    struct driven *driven = argument;
    struct engine *engine = driven->host->engine;
    static _Thread_local char header[FRAME_BYTES], scratch[SCRATCH_BYTES];
    char reason[REASON_BYTES];
    int kind, found;
    uint32_t bytes;
    uint64_t cell, offset;
    while (driven_enter(engine), (found = driven_wait_place(engine, driven->link, WAIT_S, &kind, &bytes,
                                                            &cell, &offset, reason)) >= 0) {
        if (!found) continue;
        char *place = kind == PLACE_HEADER ? header : scratch;
        if (kind == PLACE_CELL) place = bytes_of(driven, cell) + offset;
        const ssize_t got = recv(driven->in, place, bytes, MSG_WAITALL);
        const uint64_t amount = got == (ssize_t)bytes ? bytes : 0;
        if (amount && kind == PLACE_HEADER) driven_header(driven->link, header);
        engine_post(engine, COMMAND_RECEIVED, NULL, driven->link, NULL, NULL, amount);
    }
    return NULL;
}

static void begin_driven(struct driven *driven, struct host *host, int out, int in) {
    driven->host = host;
    driven->out = out;
    driven->in = in;
    pthread_mutex_init(&driven->lock, NULL);
    driven->link = link_new(2, 2, 0, true, false);
    engine_post(host->engine, COMMAND_CONNECT, NULL, driven->link, NULL, NULL, 0);
    pthread_create(&driven->sends, NULL, drive_out, driven);
    pthread_create(&driven->receives, NULL, drive_in, driven);
}

static void know(struct driven *driven, struct cell *cell) {
    pthread_mutex_lock(&driven->lock);
    driven->cells[cell->number] = cell;
    pthread_mutex_unlock(&driven->lock);
}

/* ---- Who reads behind a watermark -------------------------------------------------------------------- */
struct reader {
    struct cell *cell;
    int32_t factor;
};

static void *read_behind(void *argument) {
    const struct reader *reader = argument;
    const int32_t *words = (const int32_t *)(void *)reader->cell->bytes;
    uint64_t seen = 0;
    while (seen < NBYTES) {
        const uint64_t now = atomic_load_explicit(&reader->cell->watermark, memory_order_acquire);
        for (uint64_t i = seen / 4; i < now / 4; i++)
            check(words[i] == reader->factor * (int32_t)i, "a word behind the watermark is wrong");
        if (now == seen) usleep(200);
        seen = now / 4 * 4;
    }
    return NULL;
}

/* ---- A round: host 0 writes, 1 relays, 2 gets it on two ways and adds ----------------------------------- */
static void play(struct host *hosts, struct link *at_1, struct link *at_2, struct driven *ways,
                 int round) {
    static int32_t memory[5][WORDS];
    const uint64_t n = (uint64_t)round * 8 + 1;
    engine_hold(hosts[2].engine, true);
    memset(memory, 0, sizeof memory);
    struct cell *source = open_cell(&hosts[0], n, memory[0], n);
    know(&ways[0], source);
    struct cell *relay = open_cell(&hosts[1], n, memory[1], n);
    struct cell *one = open_cell(&hosts[2], n, memory[2], 0);
    struct cell *other = open_cell(&hosts[2], n + 1, memory[3], 0);
    know(&ways[1], other);
    struct cell *total = open_cell(&hosts[2], n + 2, memory[4], 0);
    pull(&hosts[1], relay, at_1, n);
    pull(&hosts[2], one, at_2, n);
    pull(&hosts[2], other, ways[1].link, n);
    const bool partial[2] = {false, false};
    struct cell *const sources[2] = {one, other};
    struct fold *fold = fold_new(total, REDUCE_SUM, REDUCE_INT32, 0, true, sources, partial, 2);
    engine_post(hosts[2].engine, COMMAND_FOLD, NULL, NULL, fold, NULL, 0);
    struct batch *batch = engine_memory(sizeof *batch + 2 * sizeof *batch->cells);
    batch->count = 2;
    batch->cells[0] = total;
    batch->cells[1] = other;
    engine_post_batch(hosts[2].engine, batch);
    engine_hold(hosts[2].engine, false);
    struct reader behind[2] = {{relay, 1}, {total, 2}};
    pthread_t readers[2];
    const bool given_up = round % 4 == 3; /* closed half way, with bytes in everybody's hands */
    for (int i = 0; i < 2 && !given_up; i++)
        pthread_create(&readers[i], NULL, read_behind, &behind[i]);
    for (uint64_t at = 0; at < NBYTES / (given_up ? 2 : 1); at += PIECE) {
        for (uint64_t i = at / 4; i < (at + PIECE) / 4; i++) memory[0][i] = (int32_t)i;
        engine_post(hosts[0].engine, COMMAND_ADVANCE, source, NULL, NULL, NULL, at + PIECE);
    }
    if (!given_up) {
        await(&hosts[2], &hosts[2].filled[n + 2]);
        for (int i = 0; i < 2; i++) pthread_join(readers[i], NULL);
    }
    close_cell(&hosts[2], total);
    close_cell(&hosts[2], other);
    close_cell(&hosts[2], one);
    close_cell(&hosts[1], relay);
    close_cell(&hosts[0], source);
}

int main(void) {
    static struct host hosts[ENGINES];
    static struct driven ways[2];
    for (int i = 0; i < ENGINES; i++) {
        hosts[i].engine = engine_new((uint64_t)i + 1, 64 * 1024, 100, true);
        check(hosts[i].engine, "no engine");
        pthread_mutex_init(&hosts[i].lock, NULL);
        pthread_cond_init(&hosts[i].told, NULL);
        pthread_create(&hosts[i].hears, NULL, hear, &hosts[i]);
    }
    int ends[4][2];
    for (int i = 0; i < 4; i++)
        check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends[i]), "no sockets");
    connect_link(&hosts[0], ends[0][0]);
    struct link *at_1 = connect_link(&hosts[1], ends[0][1]);
    connect_link(&hosts[1], ends[1][0]);
    struct link *at_2 = connect_link(&hosts[2], ends[1][1]);
    begin_driven(&ways[0], &hosts[0], ends[2][0], ends[3][0]);
    begin_driven(&ways[1], &hosts[2], ends[3][1], ends[2][1]);
    for (int round = 0; round < ROUNDS; round++) play(hosts, at_1, at_2, ways, round);
    for (int i = 0; i < 2; i++) {
        engine_post(ways[i].host->engine, COMMAND_DISCONNECT, NULL, ways[i].link, NULL, NULL, 0);
        pthread_join(ways[i].sends, NULL);
        shutdown(ways[i].in, SHUT_RDWR);
        pthread_join(ways[i].receives, NULL);
    }
    for (int i = 0; i < ENGINES; i++) {
        atomic_store(&hosts[i].over, true);
        pthread_join(hosts[i].hears, NULL);
        engine_stop(hosts[i].engine);
    }
    puts("race_engine: as it should be");
    return 0;
}
