/* Small calls without Python, for ThreadSanitizer: `make tsan`.
 *
 * Two engines' threads and their members meet at boards and doorbells, where one of them reads what
 * the other has just written. Each node has a memory and two members; a link is lost in the middle, and
 * frames without one are carried by the threads that hear events. Every third call is a large one,
 * for which the nodes vote.
 */
#include "engine_coll_ports.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "shm_object.h"

enum { NODES = 2, RANKS = 4, CALLS = 400, GROUP = 5, BOARD = 2, WORDS = 64,
       VOTED_EVERY = 3, PLAN = 641, RESULT = 1000 };

static void check(bool holds, const char *what) {
    if (holds) return;
    fprintf(stderr, "race_coll: %s\n", what);
    abort();
}

struct node {
    int number;
    struct engine *engine;
    char *control;
    pthread_t hears;
    atomic_bool over;
};
static struct node nodes[NODES];

static coll_request *asking(int kind) {
    coll_request *asked = engine_memory(sizeof *asked);
    asked->kind = kind;
    asked->generation = GROUP;
    asked->fd = -1;
    return asked;
}

static void *hear(void *argument) {
    struct node *node = argument;
    while (!atomic_load(&node->over)) {
        struct pollfd wanted = {.fd = node->engine->event_fd, .events = POLLIN};
        poll(&wanted, 1, 20);
        for (struct event *event = engine_take(node->engine), *next; event; event = next) {
            next = event->next;
            check(event->kind != EVENT_COLL_TAKEN, "nothing deviates here");
            if (event->kind == EVENT_COLL_SEND) {
                coll_request *asked = asking(COLL_ASK_FRAME);
                asked->node = (uint32_t)node->number;
                asked->version = event->version;
                asked->call = event->call;
                asked->phase = (uint8_t)event->phase;
                asked->plan = event->plan;
                asked->nbytes = (uint32_t)event->nbytes;
                asked->bytes = event->bytes;
                event->bytes = NULL;
                engine_post_coll(nodes[event->peer].engine, asked);
            }
            event_free(event);
        }
    }
    return NULL;
}

static bool is_over(const struct node *node, uint64_t call) {
    return call % VOTED_EVERY ? LOAD(&coll_of(node->control, BOARD)->done) == call + 1
                              : LOAD(&board_of(node->control, BOARD)->result_call) == call + 1;
}

static void wait_for_call(const struct node *node, shm_client *mine, uint64_t call) {
    const time_t begun = time(NULL);
    while (!is_over(node, call)) {
        const uint32_t seen = LOAD(&mine->event);
        ADD(&mine->sleeping, 1);
        if (!is_over(node, call)) futex_wait(&mine->event, seen, 100000000);
        ADD(&mine->sleeping, -1);
        check(time(NULL) - begun < 60, "a call takes a minute");
    }
}

/* What a node's Python says of a large call. */
static void say(const struct node *node, int kind, uint64_t call) {
    coll_request *asked = asking(kind);
    asked->call = call;
    asked->plan = PLAN;
    asked->result = RESULT + call;
    asked->awaited = call % 2;
    engine_post_coll(node->engine, asked);
}

static void make_voted(struct node *node, uint32_t rank, shm_client *mine, uint64_t call) {
    if (rank < NODES) { /* the node's first member speaks for its Python */
        say(node, COLL_ASK_BEGIN, call);
        if (call % 4) say(node, COLL_ASK_RESULT, call);
        say(node, COLL_ASK_VOTE, call);
        if (call % 4 == 0) say(node, COLL_ASK_RESULT, call);
    }
    wait_for_call(node, mine, call);
    check(LOAD(&board_of(node->control, BOARD)->result_id) == RESULT + call, "a wrong result");
}

/* A member: gives, rings, waits, and compares; or it waits until its node has voted. */
static void *live(void *argument) {
    const uint32_t rank = (uint32_t)(uintptr_t)argument;
    struct node *node = &nodes[rank % NODES];
    shm_coll *small = coll_of(node->control, BOARD);
    shm_client *mine = client_of(node->control, rank + 1);
    const int bell = eventfd(0, EFD_NONBLOCK);
    coll_request *asked = asking(COLL_ASK_BELL);
    asked->size = rank;
    asked->fd = dup(bell);
    engine_post_coll(node->engine, asked);
    for (uint64_t call = 0; call < CALLS; call++) {
        if (call % VOTED_EVERY == 0) {
            make_voted(node, rank, mine, call);
            continue;
        }
        shm_coll_part *part = &small->parts[rank];
        uint64_t *words = (uint64_t *)(small->given + (size_t)rank * coll_share(RANKS));
        for (int i = 0; i < WORDS; i++) words[i] = call * 1000 + rank * (uint64_t)i;
        part->nbytes = WORDS * 8;
        part->offset = 0;
        part->kind = CALL_ALLREDUCE;
        part->op = REDUCE_SUM;
        part->dtype = REDUCE_UINT64;
        STORE(&part->seq, call + 1);
        const uint64_t one = 1;
        check(write(bell, &one, 8) == 8, "the bell");
        wait_for_call(node, mine, call);
        const struct coll_record *record = (const struct coll_record *)small->record;
        const struct coll_place *place = (const struct coll_place *)(record + 1);
        check(record->call == call && record->count == 1, "the record is another call's");
        const uint64_t *sum = (const uint64_t *)(small->record + place->at);
        for (int i = 0; i < WORDS; i++)
            check(sum[i] == RANKS * call * 1000 + 6 * (uint64_t)i, "a sum is wrong");
    }
    close(bell);
    return NULL;
}

static void connect_all(void) {
    int ends[2];
    check(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends), "no sockets");
    for (int i = 0; i < NODES; i++) {
        struct link *link = link_new(1, (uint64_t)(1 - i), 0, false, true);
        check(!socket_take(link, ends[i]), "no link");
        close(ends[i]);
        engine_post(nodes[i].engine, COMMAND_CONNECT, NULL, link, NULL, NULL, 0);
        if (i == 0) {
            usleep(30000);
            engine_post(nodes[i].engine, COMMAND_DISCONNECT, NULL, link, NULL, NULL, 0);
        }
    }
}

int main(void) {
    for (int i = 0; i < NODES; i++) {
        struct node *node = &nodes[i];
        node->number = i;
        node->engine = engine_new((uint64_t)i + 1, 64 * 1024, 100, true);
        node->control = mmap(NULL, CONTROL_BYTES, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        check(node->engine && node->control != MAP_FAILED, "no engine or no memory");
        STORE(&board_of(node->control, BOARD)->generation, GROUP);
        coll_request *asked = asking(COLL_ASK_ADD);
        asked->size = RANKS;
        asked->node = (uint32_t)i;
        asked->board = BOARD;
        asked->control = node->control;
        for (uint32_t rank = 0; rank < RANKS; rank++)
            STORE(&board_of(node->control, BOARD)->members[rank].client, rank + 2);
        engine_post_coll(node->engine, asked);
        asked = asking(COLL_ASK_OPEN);
        asked->version = 1;
        for (uint32_t rank = 0; rank < MEMBERS; rank++)
            asked->node_of[rank] = rank < RANKS ? rank % NODES : COLL_NOBODY;
        engine_post_coll(node->engine, asked);
    }
    for (int i = 0; i < NODES; i++) pthread_create(&nodes[i].hears, NULL, hear, &nodes[i]);
    pthread_t members[RANKS];
    for (uintptr_t rank = 0; rank < RANKS; rank++)
        pthread_create(&members[rank], NULL, live, (void *)rank);
    connect_all();
    for (int rank = 0; rank < RANKS; rank++) pthread_join(members[rank], NULL);
    for (int i = 0; i < NODES; i++) {
        atomic_store(&nodes[i].over, true);
        pthread_join(nodes[i].hears, NULL);
    }
    for (int i = 0; i < NODES; i++) engine_stop(nodes[i].engine);
    puts("race_coll: no race");
    return 0;
}
