/* The engine's thread: its commands and its events.
 *
 * One thread gives every link and every fold its turn. A turn takes no longer than about a block,
 * so no one waits for a slow peer or a large sum. The thread sleeps in epoll when it is idle, and
 * is woken by a command or a socket.
 */
#include "engine_coll_ports.h"
#include "engine_state.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS_A_TURN = 64 };

void *engine_memory(size_t bytes) {
    void *memory = calloc(1, bytes ? bytes : 1);
    if (memory) return memory;
    fprintf(stderr, "hoplite_mp: the engine could not allocate %zu bytes for its own lists\n", bytes);
    abort();
}

/* ---- Commands and events ----------------------------------------------------------------------- */
static void signal_fd(int fd) {
    const uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR) {}
}

static void clear_fd(int fd) {
    uint64_t count;
    while (read(fd, &count, sizeof count) < 0 && errno == EINTR) {}
}

/* Under the lock: whether to wake the thread now. */
static bool wakes(struct engine *engine) {
    if (engine->woken || !engine->commands) return false;
    engine->woken = true;
    return engine->threaded;
}

static bool may_be_held(int kind) {
    return kind == COMMAND_CELL || kind == COMMAND_ADVANCE || kind == COMMAND_PULL || kind == COMMAND_FOLD || kind == COMMAND_CLOSE ||
           kind == COMMAND_BATCH;
}

static void post(struct engine *engine, const struct command *command) {
    struct command *posted = engine_memory(sizeof *posted);
    *posted = *command;
    pthread_mutex_lock(&engine->lock);
    if (!engine->commands)
        engine->commands = posted;
    else
        engine->last_command->next = posted;
    engine->last_command = posted;
    const bool wake = !(engine->held && may_be_held(posted->kind)) && wakes(engine);
    pthread_mutex_unlock(&engine->lock);
    if (wake) signal_fd(engine->command_fd);
}

void engine_hold(struct engine *engine, bool hold) {
    pthread_mutex_lock(&engine->lock);
    if (hold)
        engine->held++;
    else if (engine->held)
        engine->held--;
    const bool wake = !engine->held && wakes(engine);
    pthread_mutex_unlock(&engine->lock);
    if (wake) signal_fd(engine->command_fd);
}

void engine_post(struct engine *engine, int kind, struct cell *cell, struct link *link,
                 struct fold *fold, const struct frame_key *key, uint64_t amount) {
    struct command command = {
        .kind = kind, .cell = cell, .link = link, .fold = fold, .amount = amount};
    if (key) command.key = *key;
    post(engine, &command);
}

void engine_post_batch(struct engine *engine, struct batch *batch) {
    post(engine, &(struct command){.kind = COMMAND_BATCH, .batch = batch});
}

void engine_post_coll(struct engine *engine, struct coll_request *asked) {
    post(engine, &(struct command){.kind = COMMAND_COLL, .small = asked});
}

static uint64_t monotonic_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Under the lock. The descriptor stays readable until the events are taken. */
static void signal_events(struct engine *engine) {
    if (engine->signalled || !engine->events) return;
    engine->signalled = true;
    if (engine->threaded) signal_fd(engine->event_fd);
}

/* quiet: the reader of events is woken for the next event that is not quiet, or after QUIET_NS. */
static void tell(struct engine *engine, const struct event *told, bool quiet) {
    struct event *event = engine_memory(sizeof *event);
    *event = *told;
    pthread_mutex_lock(&engine->lock);
    if (engine->events)
        engine->last_event->next = event;
    else
        engine->events = event;
    engine->last_event = event;
    if (!quiet)
        signal_events(engine);
    else if (!engine->quiet_until_ns)
        engine->quiet_until_ns = monotonic_ns() + QUIET_NS;
    pthread_mutex_unlock(&engine->lock);
}

/* Reports quiet events that have waited for QUIET_NS. Returns how long the thread may sleep before
 * the next ones; -1: forever. */
static int end_quiet_ms(struct engine *engine) {
    if (!engine->quiet_until_ns) return -1;
    const uint64_t now = monotonic_ns();
    if (now < engine->quiet_until_ns) return (int)((engine->quiet_until_ns - now) / 1000000) + 1;
    engine->quiet_until_ns = 0;
    pthread_mutex_lock(&engine->lock);
    signal_events(engine);
    pthread_mutex_unlock(&engine->lock);
    return -1;
}

void engine_tell(struct engine *engine, int kind, uint64_t number, uint64_t peer,
                 const char *reason) {
    struct event event = {.kind = kind, .number = number, .peer = peer};
    snprintf(event.reason, sizeof event.reason, "%s", reason);
    tell(engine, &event, false);
}

void engine_tell_filled(struct engine *engine, uint64_t number, bool quiet) {
    tell(engine, &(struct event){.kind = EVENT_FILLED, .number = number}, quiet);
}

void engine_tell_coll(struct engine *engine, int kind, uint64_t generation, uint64_t peer,
                       uint64_t call, uint64_t version, uint8_t phase, uint32_t plan, char *bytes,
                       size_t nbytes, bool quiet) {
    tell(engine, &(struct event){.kind = kind,
                                 .number = generation,
                                 .peer = peer,
                                 .call = call,
                                 .version = version,
                                 .phase = phase,
                                 .plan = plan,
                                 .bytes = bytes,
                                 .nbytes = nbytes},
         quiet);
}

void event_free(struct event *event) {
    free(event->bytes);
    free(event);
}

struct event *engine_take(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    struct event *events = engine->events;
    if (engine->signalled && engine->threaded) clear_fd(engine->event_fd);
    engine->events = NULL;
    engine->signalled = false;
    pthread_mutex_unlock(&engine->lock);
    return events;
}

/* ---- The thread -------------------------------------------------------------------------------- */
static void connect_link(struct engine *engine, struct link *link) {
    link_open(engine, link);
    if (link->driven) return;
    struct epoll_event wanted = {
        .events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
        .data.ptr = link,
    };
    if (epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, link->fd, &wanted))
        link_lose(engine, link, "the socket cannot be watched");
}

static void execute(struct engine *engine, const struct command *command) {
    switch (command->kind) {
    case COMMAND_CELL: cell_open(engine, command->cell); break;
    case COMMAND_ADVANCE: cell_advance(engine, command->cell, command->amount); break;
    case COMMAND_PULL: pull_begin(engine, command->cell, command->link, &command->key); break;
    case COMMAND_FOLD: fold_begin(engine, command->fold); break;
    case COMMAND_CLOSE: cell_close(engine, command->cell); break;
    case COMMAND_BATCH: batch_begin(engine, command->batch); break;
    case COMMAND_CONNECT: connect_link(engine, command->link); break;
    case COMMAND_DISCONNECT: link_lose(engine, command->link, "disconnected"); break;
    case COMMAND_FREE: link_free(command->link); break;
    case COMMAND_RECEIVED:
        driven_received(engine, command->link, (uint32_t)command->amount);
        break;
    case COMMAND_SENT: driven_sent(engine, command->link); break;
    case COMMAND_STOP: engine->stopping = true; break;
    case COMMAND_COLL: coll_execute(engine, command->small); break;
    }
}

static void execute_all(struct engine *engine) {
    pthread_mutex_lock(&engine->lock);
    struct command *command = engine->commands;
    engine->commands = NULL;
    engine->woken = false;
    pthread_mutex_unlock(&engine->lock);
    while (command) {
        struct command *next = command->next;
        execute(engine, command);
        free(command);
        command = next;
    }
}

/* Edges: a link stays readable and writable until a call reports otherwise. */
static void look_at_sockets(struct engine *engine, bool sleep) {
    struct epoll_event events[EVENTS_A_TURN];
    const int look_ms = coll_sleep_ms(engine), quiet_ms = end_quiet_ms(engine);
    const int sleep_ms = look_ms >= 0 && (quiet_ms < 0 || look_ms < quiet_ms) ? look_ms : quiet_ms;
    const int count = epoll_wait(engine->epoll_fd, events, EVENTS_A_TURN, sleep ? sleep_ms : 0);
    bool posted = false, rung = look_ms >= 0;
    for (int i = 0; i < count; i++) {
        struct link *link = events[i].data.ptr;
        if (!link) {
            posted = true;
            continue;
        }
        if (coll_rung(link)) {
            rung = true;
            continue;
        }
        if (events[i].events & ~(uint32_t)EPOLLOUT) link->readable = true;
        if (events[i].events & ~(uint32_t)(EPOLLIN | EPOLLOUT)) link->ending = true;
        if (events[i].events & ~(uint32_t)EPOLLIN && !link->deaf) link->writable = true;
        link_wake(engine, link);
    }
    if (posted) {
        clear_fd(engine->command_fd);
        execute_all(engine);
    }
    if (rung) coll_answer(engine);
}

static void take_turns(struct engine *engine) {
    size_t links = 0;
    for (struct chain *at = engine->active.next; at != &engine->active; at = at->next) links++;
    while (links-- && !chain_empty(&engine->active)) {
        struct link *link = FROM(engine->active.next, struct link, in_active);
        chain_remove(&link->in_active);
        if (link->driven)
            driven_turn(engine, link);
        else
            socket_turn(engine, link);
    }
    if (!chain_empty(&engine->folds))
        fold_step(engine, FROM(engine->folds.next, struct fold, in_ready));
}

/* One turn of the loop of an engine without a thread. All its links are driven. */
bool engine_step(struct engine *engine) {
    execute_all(engine);
    take_turns(engine);
    return engine->commands || !chain_empty(&engine->active) || !chain_empty(&engine->folds);
}

static void *run(void *argument) {
    struct engine *engine = argument;
    while (!engine->stopping) {
        look_at_sockets(engine, chain_empty(&engine->active) && chain_empty(&engine->folds));
        take_turns(engine);
    }
    return NULL;
}

/* ---- Begin and end ------------------------------------------------------------------------------ */
static void free_engine(struct engine *engine) {
    if (engine->epoll_fd >= 0) close(engine->epoll_fd);
    if (engine->command_fd >= 0) close(engine->command_fd);
    if (engine->event_fd >= 0) close(engine->event_fd);
    pthread_mutex_destroy(&engine->lock);
    pthread_cond_destroy(&engine->undriven);
    free(engine->buckets);
    free(engine);
}

static int start_thread(struct engine *engine) {
    engine->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    engine->command_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    engine->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = NULL};
    if (engine->epoll_fd < 0 || engine->command_fd < 0 || engine->event_fd < 0 ||
        epoll_ctl(engine->epoll_fd, EPOLL_CTL_ADD, engine->command_fd, &wanted))
        return errno;
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    const int failed = pthread_create(&engine->thread, NULL, run, engine);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return failed;
}

struct engine *engine_new(uint64_t incarnation, uint32_t block_bytes_max,
                          uint32_t waiting_requests_max, bool threaded) {
    struct engine *engine = engine_memory(sizeof *engine);
    engine->incarnation = incarnation;
    engine->block_bytes_max = block_bytes_max;
    engine->waiting_requests_max = waiting_requests_max;
    engine->threaded = threaded;
    engine->epoll_fd = engine->command_fd = engine->event_fd = -1;
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->undriven, NULL);
    chain_init(&engine->links);
    chain_init(&engine->active);
    chain_init(&engine->folds);
    const int reason = threaded ? start_thread(engine) : 0;
    if (!reason) return engine;
    free_engine(engine);
    errno = reason;
    return NULL;
}

/* After the last command of all others. The cells belong to their owners. */
void engine_stop(struct engine *engine) {
    if (engine->threaded) {
        engine_post(engine, COMMAND_STOP, NULL, NULL, NULL, NULL, 0);
        pthread_join(engine->thread, NULL);
    }
    engine->stopping = true;
    execute_all(engine);
    for (struct chain *at = engine->links.next; at != &engine->links; at = at->next)
        link_lose(engine, FROM(at, struct link, in_links), "the engine was stopped");
    driven_wait_for_nobody(engine);
    while (!chain_empty(&engine->links))
        link_free(FROM(engine->links.next, struct link, in_links));
    coll_end(engine);
    for (struct event *event = engine_take(engine), *next; event; event = next) {
        next = event->next;
        event_free(event);
    }
    free_engine(engine);
}
