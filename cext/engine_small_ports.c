/* What small calls need of the world: boards and doorbells of members, links to
 * nodes, news for Python.
 *
 * The machine of engine_small.c knows none of them. A member writes what it gives into its place on
 * the board and writes to its doorbell, an eventfd that the engine's thread watches; what comes of
 * the call goes back to the board, and the members are woken at their event words. A frame goes over
 * any link to its node; without one Python carries it, and what may have been lost with a link is
 * sent again.
 */
#include "engine_small_ports.h"

#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "shm_object.h"

struct bell {
    struct bell *next;
    struct small_group *group;
    uint32_t rank;
    int fd;
    bool rung;
    bool unheard; /* the system does not let epoll watch it: it is looked at again and again */
};

struct small_world {
    struct small_calls calls;
    struct engine *engine;
    struct bell *bells;
    uint32_t unheard; /* how many of them */
    char *control;
};

/* Between two looks for doorbells that epoll cannot watch. Lower: less delay for calls of such
 * members, and a processor that is woken more often. */
enum { UNHEARD_LOOK_MS = 2 };

void small_play(void *play) { played = play; }

/* ---- The machine's ports ------------------------------------------------------------------------ */
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

static void send_slot(void *context, struct small_group *group, uint32_t node,
                      const struct small_slot *slot) {
    struct small_world *world = context;
    struct link *link = link_to(world->engine, node);
    char *bytes = slot->nbytes ? copy_of(slot->parts, slot->nbytes) : NULL;
    if (!link) {
        engine_tell_small(world->engine, EVENT_SMALL_SEND, group->generation, node, slot->call,
                          slot->version, slot->phase, slot->plan, bytes, slot->nbytes, false);
        return;
    }
    const struct frame frame = {
        .type = FRAME_SMALL,
        .length = slot->nbytes,
        .operation = group->generation,
        .part = slot->phase,
        .epoch = slot->plan,
        .offset = slot->call,
        .end = slot->version,
    };
    link_notify_block(world->engine, link, &frame, bytes);
}

static shm_board *board_beside(const struct small_world *world, const struct small_group *group) {
    const shm_small *small = group->board;
    return board_of(world->control, (unsigned)(small - small_of(world->control, 0)));
}

/* False: the Group has ended, which Python has not told this thread yet, and its board belongs to
 * another Group, or to none. */
static bool has_board(const struct small_world *world, const struct small_group *group) {
    return LOAD(&board_beside(world, group)->generation) == group->generation;
}

static void wake_members(const struct small_world *world, const struct small_group *group) {
    const shm_board *board = board_beside(world, group);
    for (uint64_t ranks = group->here; ranks; ranks &= ranks - 1) {
        const uint64_t client = LOAD(&board->members[__builtin_ctzll(ranks)].client);
        if (client && client <= CLIENTS) wake_client(world->control, (unsigned)(client - 1));
    }
}

static void commit(void *context, struct small_group *group) {
    if (!has_board(context, group)) return;
    shm_small *small = group->board;
    const struct small_record *record = (const struct small_record *)group->last;
    memcpy(small->record, record, record->nbytes);
    STORE(&small->done, group->call);
    wake_members(context, group);
}

/* As Board.commit in tasks_boards.pxi. */
static void commit_moved(void *context, struct small_group *group) {
    if (!has_board(context, group)) return;
    shm_board *board = board_beside(context, group);
    STORE(&board->result_id, group->result);
    STORE(&board->result_call, group->call);
    wake_members(context, group);
}

static void tell(void *context, struct small_group *group, int news, uint64_t number,
                 const void *bytes, size_t nbytes) {
    struct small_world *world = context;
    static const int kinds[] = {
        [SMALL_TAKEN] = EVENT_SMALL_TAKEN,
        [SMALL_PART] = EVENT_SMALL_PART,
        [SMALL_FIRST] = EVENT_SMALL_FIRST,
        [SMALL_MOVED] = EVENT_SMALL_MOVED,
    };
    engine_tell_small(world->engine, kinds[news], group->generation, 0, number, group->version, 0, 0,
                      nbytes ? copy_of(bytes, nbytes) : NULL, nbytes,
                      news == SMALL_MOVED && !group->awaited);
}

/* ---- Boards and doorbells ----------------------------------------------------------------------- */
/* The seq is written last, and the member waits from then on, so what stands there is whole. */
static void look_at(struct small_world *world, struct small_group *group, uint32_t rank) {
    const shm_small *small = group->board;
    const shm_small_part *given = &small->parts[rank];
    const uint64_t seq = LOAD(&given->seq);
    if (seq <= group->members[rank].seq) return;
    const struct small_part part = {
        rank, given->nbytes, given->offset, given->kind, given->op, given->dtype, given->root,
    };
    const uint32_t share = small_share(group->size);
    if (part.nbytes > share || part.offset > part.nbytes) return; /* no client of ours wrote it */
    small_given(&world->calls, group, seq - 1, &part, small->given + (size_t)rank * share);
}

static void look_at_all(struct small_world *world) {
    for (struct small_group *group = world->calls.groups; group; group = group->next)
        for (uint32_t rank = 0; rank < group->size; rank++) look_at(world, group, rank);
}

static void drop_bell(struct small_world *world, struct bell **at) {
    struct bell *bell = *at;
    *at = bell->next;
    world->unheard -= bell->unheard;
    epoll_ctl(world->engine->epoll_fd, EPOLL_CTL_DEL, bell->fd, NULL);
    close(bell->fd);
    free(bell);
}

static void hang_bell(struct small_world *world, struct small_group *group, uint32_t rank, int fd) {
    for (struct bell **at = &world->bells; *at;)
        if ((*at)->group == group && (*at)->rank == rank)
            drop_bell(world, at);
        else
            at = &(*at)->next;
    struct bell *bell = engine_memory(sizeof *bell);
    *bell = (struct bell){.next = world->bells, .group = group, .rank = rank, .fd = fd};
    world->bells = bell;
    /* An edge for each write: nobody reads it. The lowest bit tells it from links. */
    struct epoll_event wanted = {
        .events = EPOLLIN | EPOLLET,
        .data.ptr = (char *)bell + 1,
    };
    if (world->engine->threaded && epoll_ctl(world->engine->epoll_fd, EPOLL_CTL_ADD, fd, &wanted)) {
        bell->unheard = true; /* the user has as many watches as the system allows, or no memory is left */
        world->unheard++;
    }
    look_at(world, group, rank);
}

int small_sleep_ms(const struct engine *engine) {
    return engine->small && engine->small->unheard ? UNHEARD_LOOK_MS : -1;
}

bool small_rung(void *pointer) {
    if (!((uintptr_t)pointer & 1)) return false;
    ((struct bell *)((char *)pointer - 1))->rung = true;
    return true;
}

/* After the commands, so that what was opened before a member was woken is open. */
void small_answer(struct engine *engine) {
    struct small_world *world = engine->small;
    if (!world) return;
    for (struct bell *bell = world->bells; bell; bell = bell->next) {
        if (!bell->rung && !bell->unheard) continue;
        bell->rung = false;
        look_at(world, bell->group, bell->rank);
    }
}

/* ---- From links and from Python ------------------------------------------------------------------- */
const char *small_frame(struct engine *engine, struct link *link, const struct frame *frame,
                        const char *bytes) {
    if (!engine->small) return NULL;
    return small_receive(&engine->small->calls, frame->operation, (uint32_t)link->peer,
                         frame->end, frame->offset, (uint8_t)frame->part, frame->epoch, bytes,
                         frame->length);
}

bool small_cells_full(struct engine *engine, const struct batch *batch) {
    struct small_world *world = engine->small;
    struct small_group *group = world ? small_find(&world->calls, batch->generation) : NULL;
    return group && small_vote(&world->calls, group, batch->call, batch->plan);
}

void small_link_lost(struct engine *engine, struct link *link) {
    if (engine->small && !engine->stopping) small_resend(&engine->small->calls, (uint32_t)link->peer);
}

static void forget(struct small_world *world, uint64_t generation) {
    for (struct bell **at = &world->bells; *at;)
        if ((*at)->group->generation == generation)
            drop_bell(world, at);
        else
            at = &(*at)->next;
    small_forget(&world->calls, generation);
}

static struct small_world *world_of(struct engine *engine, char *control) {
    if (engine->small) return engine->small;
    struct small_world *world = engine->small = engine_memory(sizeof *world);
    world->engine = engine;
    world->control = control;
    world->calls.ports = (struct small_ports){world, send_slot, commit, commit_moved, tell};
    return world;
}

void small_execute(struct engine *engine, struct small_request *asked) {
    struct small_world *world = engine->small;
    struct small_group *group = world ? small_find(&world->calls, asked->generation) : NULL;
    switch (asked->kind) {
    case SMALL_ASK_ADD:
        if (group) break;
        world = world_of(engine, asked->control);
        group = small_add(&world->calls, asked->generation, asked->size, asked->node);
        group->board = small_of(asked->control, asked->board);
        break;
    case SMALL_ASK_OPEN:
        if (group) small_open(&world->calls, group, asked->version, asked->call, asked->node_of);
        break;
    case SMALL_ASK_CLOSE:
        if (group) small_close(&world->calls, group);
        break;
    case SMALL_ASK_YIELD:
        if (group) small_yield(&world->calls, group, asked->call);
        break;
    case SMALL_ASK_BEGIN:
        if (group) small_begin(&world->calls, group, asked->call, asked->plan);
        break;
    case SMALL_ASK_VOTE:
        if (group) (void)small_vote(&world->calls, group, asked->call, asked->plan);
        break;
    case SMALL_ASK_RESULT:
        if (group) small_result(&world->calls, group, asked->call, asked->result, asked->awaited);
        break;
    case SMALL_ASK_FORGET:
        if (group) forget(world, asked->generation);
        break;
    case SMALL_ASK_FRAME: /* Python has carried it, and checked nothing */
        if (group)
            (void)small_receive(&world->calls, asked->generation, asked->node, asked->version,
                                asked->call, asked->phase, asked->plan, asked->bytes,
                                asked->nbytes);
        break;
    case SMALL_ASK_BELL:
        if (group && asked->size < group->size)
            hang_bell(world, group, asked->size, asked->fd);
        else
            close(asked->fd);
        break;
    case SMALL_ASK_LOOK:
        if (world) look_at_all(world);
        break;
    }
    free(asked->bytes);
    free(asked);
}

void small_end(struct engine *engine) {
    struct small_world *world = engine->small;
    if (!world) return;
    while (world->bells) drop_bell(world, &world->bells);
    small_forget_all(&world->calls);
    free(world);
    engine->small = NULL;
}
