/* The ports of engine_coll.c: boards and doorbells of members, links to nodes, events for Python.
 *
 * engine_coll.c itself accesses none of them. A member writes its part to its place on the board,
 * and then to its doorbell, an eventfd that the engine's thread watches. The result of the call is
 * written to the board, and the members are woken at their event words. A frame is sent over any
 * link to its node; without a link Python sends it. Frames that may have been lost with a link are
 * sent again.
 */
#include "engine_coll_ports.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "shm_object.h"

struct bell {
    struct bell *next;
    struct coll_group *group;
    uint32_t rank;
    int fd;
    bool rung;
    bool unheard; /* epoll cannot watch it, so it is polled */
};

struct coll_world {
    struct coll_calls calls;
    struct engine *engine;
    struct bell *bells;
    uint32_t unheard; /* their number */
    char *control;
};

/* Polling interval of doorbells that epoll cannot watch. Lower: less delay for calls of their
 * members, and more wake-ups of a processor. */
enum { UNHEARD_LOOK_MS = 2 };

void coll_play(void *play) { played = play; }

/* ---- Ports of the state machine ----------------------------------------------------------------- */
static struct link *link_to(struct engine *engine, uint32_t node) {
    for (struct chain *at = engine->links.next; at != &engine->links; at = at->next) {
        struct link *link = FROM(at, struct link, in_links);
        if (link->peer == node && !link->lost && !link->deaf) return link;
    }
    return NULL;
}

static char *copy_of(const void *bytes, size_t nbytes) {
    char *copy = engine_memory(nbytes);
    memcpy(copy, bytes, nbytes);
    return copy;
}

static void send_slot(void *context, struct coll_group *group, uint32_t node,
                      const struct coll_slot *slot) {
    struct coll_world *world = context;
    struct link *link = link_to(world->engine, node);
    char *bytes = slot->nbytes ? copy_of(slot->parts, slot->nbytes) : NULL;
    if (!link) {
        engine_tell_coll(world->engine, EVENT_COLL_SEND, group->generation, node, slot->call,
                          slot->version, slot->phase, slot->plan, bytes, slot->nbytes, false);
        return;
    }
    const struct frame frame = {
        .type = FRAME_COLL,
        .length = slot->nbytes,
        .operation = group->generation,
        .part = slot->phase,
        .epoch = slot->plan,
        .offset = slot->call,
        .end = slot->version,
    };
    link_notify_block(world->engine, link, &frame, bytes);
}

static shm_board *board_beside(const struct coll_world *world, const struct coll_group *group) {
    const shm_coll *small = group->board;
    return board_of(world->control, (unsigned)(small - coll_of(world->control, 0)));
}

/* False: the Group has ended, which Python has not told this thread yet, and its board belongs to
 * another Group, or to none. */
static bool has_board(const struct coll_world *world, const struct coll_group *group) {
    return LOAD(&board_beside(world, group)->generation) == group->generation;
}

static void wake_members(const struct coll_world *world, const struct coll_group *group) {
    const shm_board *board = board_beside(world, group);
    for (uint64_t ranks = group->here; ranks; ranks &= ranks - 1) {
        const uint64_t client = LOAD(&board->members[__builtin_ctzll(ranks)].client);
        if (client && client <= CLIENTS) wake_client(world->control, (unsigned)(client - 1));
    }
}

static void commit(void *context, struct coll_group *group) {
    if (!has_board(context, group)) return;
    shm_coll *small = group->board;
    const struct coll_record *record = (const struct coll_record *)group->last;
    memcpy(small->record, record, record->nbytes);
    STORE(&small->done, group->call);
    wake_members(context, group);
}

/* As Board.commit in tasks_boards.pxi. */
static void commit_moved(void *context, struct coll_group *group) {
    if (!has_board(context, group)) return;
    shm_board *board = board_beside(context, group);
    STORE(&board->result_id, group->result);
    STORE(&board->result_call, group->call);
    wake_members(context, group);
}

static void tell(void *context, struct coll_group *group, int news, uint64_t number,
                 const void *bytes, size_t nbytes) {
    struct coll_world *world = context;
    static const int kinds[] = {
        [COLL_TAKEN] = EVENT_COLL_TAKEN,
        [COLL_PART] = EVENT_COLL_PART,
        [COLL_FIRST] = EVENT_COLL_FIRST,
        [COLL_MOVED] = EVENT_COLL_MOVED,
    };
    engine_tell_coll(world->engine, kinds[news], group->generation, 0, number, group->version, 0, 0,
                      nbytes ? copy_of(bytes, nbytes) : NULL, nbytes,
                      news == COLL_MOVED && !group->awaited);
}

/* ---- Boards and doorbells ----------------------------------------------------------------------- */
/* The seq is written last, and the member waits from then on, so the part is complete. */
static void look_at(struct coll_world *world, struct coll_group *group, uint32_t rank) {
    const shm_coll *small = group->board;
    const shm_coll_part *given = &small->parts[rank];
    const uint64_t seq = LOAD(&given->seq);
    if (seq <= group->members[rank].seq) return;
    const struct coll_part part = {
        rank, given->nbytes, given->offset, given->kind, given->op, given->dtype, given->root,
    };
    const uint32_t share = coll_share(group->size);
    /* malformed, so not written by a client of ours */
    if (part.nbytes > share || part.offset > part.nbytes) return;
    coll_given(&world->calls, group, seq - 1, &part, small->given + (size_t)rank * share);
}

static void look_at_all(struct coll_world *world) {
    for (struct coll_group *group = world->calls.groups; group; group = group->next)
        for (uint32_t rank = 0; rank < group->size; rank++) look_at(world, group, rank);
}

static void drop_bell(struct coll_world *world, struct bell **at) {
    struct bell *bell = *at;
    *at = bell->next;
    world->unheard -= bell->unheard;
    epoll_ctl(world->engine->epoll_fd, EPOLL_CTL_DEL, bell->fd, NULL);
    close(bell->fd);
    free(bell);
}

static void hang_bell(struct coll_world *world, struct coll_group *group, uint32_t rank, int fd) {
    for (struct bell **at = &world->bells; *at;)
        if ((*at)->group == group && (*at)->rank == rank)
            drop_bell(world, at);
        else
            at = &(*at)->next;
    struct bell *bell = engine_memory(sizeof *bell);
    *bell = (struct bell){.next = world->bells, .group = group, .rank = rank, .fd = fd};
    world->bells = bell;
    /* An edge for each write, without reads. The lowest bit distinguishes it from links. */
    struct epoll_event wanted = {
        .events = EPOLLIN | EPOLLET,
        .data.ptr = (char *)bell + 1,
    };
    if (world->engine->threaded && epoll_ctl(world->engine->epoll_fd, EPOLL_CTL_ADD, fd, &wanted)) {
        bell->unheard = true; /* the user's limit of watches is reached, or there is no memory */
        world->unheard++;
    }
    look_at(world, group, rank);
}

int coll_sleep_ms(const struct engine *engine) {
    return engine->small && engine->small->unheard ? UNHEARD_LOOK_MS : -1;
}

bool coll_rung(void *pointer) {
    if (!((uintptr_t)pointer & 1)) return false;
    ((struct bell *)((char *)pointer - 1))->rung = true;
    return true;
}

/* After the commands, so that everything opened before a member was woken is open. */
void coll_answer(struct engine *engine) {
    struct coll_world *world = engine->small;
    if (!world) return;
    for (struct bell *bell = world->bells; bell; bell = bell->next) {
        if (!bell->rung && !bell->unheard) continue;
        bell->rung = false;
        look_at(world, bell->group, bell->rank);
    }
}

/* ---- Frames of links, requests of Python ---------------------------------------------------------- */
const char *coll_frame(struct engine *engine, struct link *link, const struct frame *frame,
                        const char *bytes) {
    if (!engine->small) return NULL;
    return coll_receive(&engine->small->calls, frame->operation, (uint32_t)link->peer,
                         frame->end, frame->offset, (uint8_t)frame->part, frame->epoch, bytes,
                         frame->length);
}

bool coll_cells_full(struct engine *engine, const struct batch *batch) {
    struct coll_world *world = engine->small;
    struct coll_group *group = world ? coll_find(&world->calls, batch->generation) : NULL;
    return group && coll_vote(&world->calls, group, batch->call, batch->plan);
}

void coll_link_lost(struct engine *engine, struct link *link) {
    if (engine->small && !engine->stopping) coll_resend(&engine->small->calls, (uint32_t)link->peer);
}

static void forget(struct coll_world *world, uint64_t generation) {
    for (struct bell **at = &world->bells; *at;)
        if ((*at)->group->generation == generation)
            drop_bell(world, at);
        else
            at = &(*at)->next;
    coll_forget(&world->calls, generation);
}

static struct coll_world *world_of(struct engine *engine, char *control) {
    if (engine->small) return engine->small;
    struct coll_world *world = engine->small = engine_memory(sizeof *world);
    world->engine = engine;
    world->control = control;
    world->calls.ports = (struct coll_ports){world, send_slot, commit, commit_moved, tell};
    return world;
}

void coll_execute(struct engine *engine, struct coll_request *asked) {
    struct coll_world *world = engine->small;
    struct coll_group *group = world ? coll_find(&world->calls, asked->generation) : NULL;
    switch (asked->kind) {
    case COLL_ASK_ADD:
        if (group) break;
        world = world_of(engine, asked->control);
        group = coll_add(&world->calls, asked->generation, asked->size, asked->node);
        group->board = coll_of(asked->control, asked->board);
        break;
    case COLL_ASK_OPEN:
        if (group) coll_open(&world->calls, group, asked->version, asked->call, asked->node_of);
        break;
    case COLL_ASK_CLOSE:
        if (group) coll_close(&world->calls, group);
        break;
    case COLL_ASK_YIELD:
        if (group) coll_yield(&world->calls, group, asked->call);
        break;
    case COLL_ASK_BEGIN:
        if (group) coll_begin(&world->calls, group, asked->call, asked->plan);
        break;
    case COLL_ASK_VOTE:
        if (group) (void)coll_vote(&world->calls, group, asked->call, asked->plan);
        break;
    case COLL_ASK_RESULT:
        if (group) coll_result(&world->calls, group, asked->call, asked->result, asked->awaited);
        break;
    case COLL_ASK_FORGET:
        if (group) forget(world, asked->generation);
        break;
    case COLL_ASK_FRAME: /* Python has forwarded it unchecked */
        if (group)
            (void)coll_receive(&world->calls, asked->generation, asked->node, asked->version,
                                asked->call, asked->phase, asked->plan, asked->bytes,
                                asked->nbytes);
        break;
    case COLL_ASK_BELL:
        if (group && asked->size < group->size)
            hang_bell(world, group, asked->size, asked->fd);
        else
            close(asked->fd);
        break;
    case COLL_ASK_LOOK:
        if (world) look_at_all(world);
        break;
    }
    free(asked->bytes);
    free(asked);
}

void coll_end(struct engine *engine) {
    struct coll_world *world = engine->small;
    if (!world) return;
    while (world->bells) drop_bell(world, &world->bells);
    coll_forget_all(&world->calls);
    free(world);
    engine->small = NULL;
}
