/* The state machine of small calls: see engine_coll.h for the protocol and its safety.
 *
 * This file contains only the protocol's decisions.
 */
#include "engine_coll.h"

#include <stdlib.h>
#include <string.h>

void *engine_memory(size_t bytes);

enum { LAST_ALIGN = 64 };

static uint64_t bit(uint32_t rank) { return 1ull << rank; }

/* ---- Groups ----------------------------------------------------------------------------------- */
struct coll_group *coll_find(struct coll_calls *all, uint64_t generation) {
    struct coll_group *group = all->groups;
    while (group && group->generation != generation) group = group->next;
    return group;
}

struct coll_group *coll_add(struct coll_calls *all, uint64_t generation, uint32_t size,
                              uint32_t me) {
    struct coll_group *group = engine_memory(sizeof *group);
    group->generation = generation;
    group->size = size;
    group->me = me;
    group->own.number = me;
    if (posix_memalign((void **)&group->last, LAST_ALIGN, COLL_RECORD_BYTES)) abort();
    group->next = all->groups;
    all->groups = group;
    return group;
}

static void free_slots(struct coll_node *node) {
    free(node->slots[0].parts);
    free(node->slots[1].parts);
}

static void free_group(struct coll_group *group) {
    free_slots(&group->own);
    for (struct coll_node *node = group->others, *next; node; node = next) {
        next = node->next;
        free_slots(node);
        free(node);
    }
    for (uint32_t rank = 0; rank < MEMBERS; rank++) free(group->members[rank].bytes);
    free(group->last);
    free(group);
}

void coll_forget(struct coll_calls *all, uint64_t generation) {
    for (struct coll_group **at = &all->groups; *at; at = &(*at)->next) {
        struct coll_group *group = *at;
        if (group->generation != generation) continue;
        *at = group->next;
        free_group(group);
        return;
    }
}

void coll_forget_all(struct coll_calls *all) {
    while (all->groups) coll_forget(all, all->groups->generation);
}

/* ---- Parts of nodes ----------------------------------------------------------------------------- */
static void keep(char **place, uint32_t *room, const void *bytes, uint32_t nbytes) {
    if (nbytes > *room) {
        free(*place);
        *place = engine_memory(nbytes);
        *room = nbytes;
    }
    if (nbytes) memcpy(*place, bytes, nbytes);
}

static struct coll_node *node_of(struct coll_group *group, uint32_t number) {
    struct coll_node *node = group->others;
    while (node && node->number != number) node = node->next;
    if (node) return node;
    node = engine_memory(sizeof *node);
    node->number = number;
    node->next = group->others;
    group->others = node;
    return node;
}

static struct coll_slot *slot_of(struct coll_node *node, uint64_t call) {
    return &node->slots[call & 1];
}

/* Whether the slot has the node's frame about the call in progress. */
static bool is_current(const struct coll_group *group, const struct coll_slot *slot) {
    return slot->here && slot->version == group->version && slot->call == group->call;
}

/* Whether it is the node's last frame about this call. */
static bool is_last_word(const struct coll_group *group, const struct coll_slot *slot) {
    return is_current(group, slot) && slot->phase != COLL_BEGUN;
}

/* Whether the node is another node with members. */
bool coll_takes_part(const struct coll_group *group, uint32_t number) {
    if (number == group->me) return false;
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->node_of[rank] == number) return true;
    return false;
}

/* ---- Giving calls to Python ---------------------------------------------------------------------- */
static void tell_part(struct coll_calls *all, struct coll_group *group, uint32_t rank) {
    const struct coll_member *member = &group->members[rank];
    const uint32_t nbytes = member->part.nbytes;
    char *both = engine_memory(sizeof member->part + nbytes);
    memcpy(both, &member->part, sizeof member->part);
    if (nbytes) memcpy(both + sizeof member->part, member->bytes, nbytes);
    all->ports.tell(all->ports.context, group, COLL_PART, member->seq - 1, both,
                    sizeof member->part + nbytes);
    free(both);
}

static void take(struct coll_calls *all, struct coll_group *group) {
    group->open = group->yields = false;
    const struct coll_record *last = (const struct coll_record *)group->last;
    const bool has = group->has_last && last->call + 1 == group->call;
    all->ports.tell(all->ports.context, group, COLL_TAKEN, group->call, has ? last : NULL,
                    has ? last->nbytes : 0);
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->members[rank].seq == group->call + 1) tell_part(all, group, rank);
}

/* ---- A call --------------------------------------------------------------------------------------- */
static void send_to_all(struct coll_calls *all, struct coll_group *group,
                        const struct coll_slot *slot) {
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const uint32_t node = group->node_of[rank];
        bool first = node != group->me && node != COLL_NOBODY;
        for (uint32_t before = 0; before < rank; before++)
            if (group->node_of[before] == node) first = false;
        if (first) all->ports.send(all->ports.context, group, node, slot);
    }
}

static struct coll_slot *begin_own(struct coll_group *group, uint8_t phase, uint32_t plan) {
    struct coll_slot *slot = slot_of(&group->own, group->call);
    slot->here = true;
    slot->phase = phase;
    slot->plan = plan;
    slot->version = group->version;
    slot->call = group->call;
    slot->nbytes = 0;
    return slot;
}

/* All members here have called: sends their parts to the other nodes. */
static void give(struct coll_calls *all, struct coll_group *group) {
    struct coll_slot *slot = begin_own(group, COLL_GIVES, 0);
    uint32_t nbytes = 0;
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->here & bit(rank)) nbytes += sizeof(struct coll_part) + group->members[rank].part.nbytes;
    if (nbytes > slot->room) {
        free(slot->parts);
        slot->parts = engine_memory(nbytes);
        slot->room = nbytes;
    }
    for (uint32_t rank = 0; rank < group->size; rank++) {
        if (!(group->here & bit(rank))) continue;
        const struct coll_member *member = &group->members[rank];
        memcpy(slot->parts + slot->nbytes, &member->part, sizeof member->part);
        slot->nbytes += sizeof member->part;
        if (member->part.nbytes) memcpy(slot->parts + slot->nbytes, member->bytes, member->part.nbytes);
        slot->nbytes += member->part.nbytes;
    }
    send_to_all(all, group, slot);
}

/* Whether all nodes' last frames about the call in progress are here. */
static bool all_here(struct coll_group *group, bool *yields) {
    bool here = is_last_word(group, slot_of(&group->own, group->call));
    for (uint32_t rank = 0; rank < group->size; rank++) {
        const uint32_t number = group->node_of[rank];
        if (number == COLL_NOBODY || number == group->me) continue;
        const struct coll_slot *slot = slot_of(node_of(group, number), group->call);
        if (!is_last_word(group, slot))
            here = false;
        else if (slot->phase == COLL_YIELDS)
            *yields = true;
    }
    return here;
}

/* Whether another node has given parts, or has named another plan than this node's. */
static bool is_other_call(struct coll_group *group, const struct coll_slot *own) {
    for (struct coll_node *node = group->others; node; node = node->next) {
        const struct coll_slot *slot = slot_of(node, group->call);
        if (!coll_takes_part(group, node->number) || !is_current(group, slot)) continue;
        if (slot->phase == COLL_GIVES || (slot->phase != COLL_YIELDS && slot->plan != own->plan))
            return true;
    }
    return false;
}

static void commit_coll(struct coll_calls *all, struct coll_group *group) {
    group->call++;
    all->ports.commit(all->ports.context, group);
    if (group->fresh)
        all->ports.tell(all->ports.context, group, COLL_FIRST, group->call, NULL, 0);
    group->fresh = false;
}

/* This node and all others have voted for the same plan. False: its result is not made yet. */
static bool commit_moved(struct coll_calls *all, struct coll_group *group) {
    if (!group->result) return false;
    group->call++;
    group->has_last = false; /* Python has it: this event precedes TAKEN */
    all->ports.commit_moved(all->ports.context, group);
    all->ports.tell(all->ports.context, group, COLL_MOVED, group->call - 1, NULL, 0);
    group->result = 0;
    group->fresh = true;
    return true;
}

static void advance(struct coll_calls *all, struct coll_group *group) {
    while (group->open) {
        const struct coll_slot *own = slot_of(&group->own, group->call);
        const bool begun = is_current(group, own) && own->phase == COLL_BEGUN;
        const bool yielding = group->yields && group->yield_at == group->call;
        /* No node yields after its last frame, because others may have committed the call by now.
         * If they have not, because one of them yields, its frame says so. */
        if ((yielding && !is_last_word(group, own)) || (begun && is_other_call(group, own))) {
            send_to_all(all, group, begin_own(group, COLL_YIELDS, 0));
            take(all, group);
            return;
        }
        bool yields = false;
        const bool here = all_here(group, &yields);
        if (yields) {
            take(all, group);
            return;
        }
        if (!here) return;
        const bool same = own->phase != COLL_VOTES || !is_other_call(group, own);
        if (same && own->phase == COLL_VOTES) {
            if (!commit_moved(all, group)) return;
        } else if (same && coll_combine(group)) {
            commit_coll(all, group);
        } else {
            take(all, group);
            return;
        }
    }
}

static void give_if_all(struct coll_calls *all, struct coll_group *group) {
    for (uint32_t rank = 0; rank < group->size; rank++)
        if (group->here & bit(rank) && group->members[rank].seq != group->call + 1) return;
    if (group->here && !is_current(group, slot_of(&group->own, group->call))) give(all, group);
}

/* ---- Inputs ---------------------------------------------------------------------------------------- */
void coll_open(struct coll_calls *all, struct coll_group *group, uint64_t version,
                uint64_t call, const uint32_t *nodes) {
    group->open = group->fresh = true;
    group->yields = group->has_last = false;
    group->result = 0;
    group->version = version;
    group->call = call;
    group->ranks = group->here = 0;
    for (uint32_t rank = 0; rank < group->size; rank++) {
        group->node_of[rank] = nodes[rank];
        if (nodes[rank] == COLL_NOBODY) continue;
        group->ranks |= bit(rank);
        if (nodes[rank] == group->me) group->here |= bit(rank);
    }
    give_if_all(all, group); /* members here may already have called */
    advance(all, group);
}

void coll_close(struct coll_calls *all, struct coll_group *group) {
    if (group->open) take(all, group);
}

void coll_yield(struct coll_calls *all, struct coll_group *group, uint64_t call) {
    if (!group->open || call < group->call) return;
    if (!group->yields || group->yield_at < group->call || call < group->yield_at)
        group->yield_at = call;
    group->yields = true;
    advance(all, group);
}

/* Whether this node may send its next frame about the call in progress. */
static bool may_say(struct coll_group *group, uint64_t call) {
    return group->open && call == group->call &&
           !is_last_word(group, slot_of(&group->own, group->call));
}

void coll_begin(struct coll_calls *all, struct coll_group *group, uint64_t call, uint32_t plan) {
    if (!may_say(group, call)) return;
    group->result = 0;
    send_to_all(all, group, begin_own(group, COLL_BEGUN, plan));
    advance(all, group);
}

bool coll_vote(struct coll_calls *all, struct coll_group *group, uint64_t call, uint32_t plan) {
    if (!may_say(group, call)) return false;
    send_to_all(all, group, begin_own(group, COLL_VOTES, plan));
    advance(all, group);
    return true;
}

void coll_result(struct coll_calls *all, struct coll_group *group, uint64_t call,
                  uint64_t result, bool awaited) {
    const struct coll_slot *own = slot_of(&group->own, group->call);
    if (!group->open || call != group->call || !is_current(group, own)) return;
    group->result = result;
    group->awaited = awaited;
    advance(all, group);
}

void coll_given(struct coll_calls *all, struct coll_group *group, uint64_t call,
                 const struct coll_part *part, const char *bytes) {
    if (part->rank >= group->size) return;
    struct coll_member *member = &group->members[part->rank];
    if (call + 1 <= member->seq) return; /* already known */
    member->seq = call + 1;
    member->part = *part;
    keep(&member->bytes, &member->room, bytes, part->nbytes);
    if (!group->open || call != group->call || !(group->here & bit(part->rank))) {
        tell_part(all, group, part->rank);
        return;
    }
    give_if_all(all, group);
    advance(all, group);
}

static const char *fault_of(const char *parts, uint32_t nbytes) {
    for (uint32_t at = 0; at < nbytes;) {
        struct coll_part part;
        if (nbytes - at < sizeof part) return "a small call's parts end too early";
        memcpy(&part, parts + at, sizeof part);
        at += sizeof part;
        if (part.nbytes > nbytes - at || part.offset > part.nbytes)
            return "a small call's part is longer than its frame";
        at += part.nbytes;
    }
    return NULL;
}

const char *coll_receive(struct coll_calls *all, uint64_t generation, uint32_t number,
                          uint64_t version, uint64_t call, uint8_t phase, uint32_t plan,
                          const char *parts, uint32_t nbytes) {
    if (nbytes > COLL_FRAME_BYTES_MAX) return "a small call's frame is too long";
    if (phase >= COLL_PHASE_END) return "a small call's frame of an unknown phase";
    const char *fault = fault_of(parts, nbytes);
    if (fault) return fault;
    struct coll_group *group = coll_find(all, generation);
    /* the Group has ended, or this node has left it */
    if (!group || number == group->me) return NULL;
    struct coll_slot *slot = slot_of(node_of(group, number), call);
    const bool same = version == slot->version && call == slot->call;
    const bool newer = !slot->here || version > slot->version ||
                       (version == slot->version && call > slot->call) ||
                       (same && slot->phase == COLL_BEGUN && phase != COLL_BEGUN);
    if (!newer) return NULL; /* a duplicate */
    slot->here = true;
    slot->phase = phase;
    slot->plan = plan;
    slot->version = version;
    slot->call = call;
    keep(&slot->parts, &slot->room, parts, nbytes);
    slot->nbytes = nbytes;
    if (group->open && version == group->version && call == group->call) advance(all, group);
    return NULL;
}

void coll_resend(struct coll_calls *all, uint32_t number) {
    for (struct coll_group *group = all->groups; group; group = group->next) {
        if (!coll_takes_part(group, number)) continue;
        const uint64_t before = group->call ? group->call - 1 : 0;
        for (uint64_t call = before; call <= group->call; call++) {
            const struct coll_slot *slot = slot_of(&group->own, call);
            if (slot->here && slot->version == group->version && slot->call == call)
                all->ports.send(all->ports.context, group, number, slot);
        }
    }
}
