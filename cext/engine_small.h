/* Small calls of Groups over several hosts: a protocol between the engines of their nodes.
 *
 * A call of a few KiB costs a millisecond if every node handles it in Python. While all members
 * make calls of one kind and shape, and none dies, there is nothing to decide: each node sends what
 * its members give to all other nodes, and whoever has all parts has the result.
 *
 *     CLOSED ──open(version, call)──► OPEN ──TAKEN──► CLOSED        (Python owns the calls)
 *                                     │  ▲ call + 1
 *        own members have all called  ▼  │ all nodes' parts are here, and agree
 *             one frame to each other node ──► fold in the order of ranks ──► the board, members wake
 *
 * A call that is not small, whose bytes the nodes move by the plan of an earlier call
 * (_node/groups/repeated_plans.py), is committed by the same frames, as by the votes of a two-phase
 * commit. Each node names the plan when Python has begun to move (*begun*), and says once more when
 * it has all that it should receive (*vote*). Whoever has the votes of all nodes for one plan, and
 * the object that Python has made of the bytes, writes that object's id to the board:
 *
 *        Python: begin(call, plan)  ▼  one frame to each other node
 *        the last cell is full,
 *        or Python: vote            ▼  one frame to each other node
 *        Python: result(object)     ▼  votes of all nodes for this plan ──► the board, member wakes
 *
 * OPEN ends, and all that Python must know is told (TAKEN, then a PART for each call that a member
 * here has made and that is not over), when
 *   - this node *yields* call k, because a member here gives what no small call carries, and there
 *     is no plan to repeat. Its frame of call k then says so in the place of parts, so no node can
 *     ever have all parts of call k, and every node that receives it hands call k to Python;
 *   - this node has begun to move call k, has not voted, and another one gives parts or names
 *     another plan: it yields, because the bytes that it waits for may never come;
 *   - the parts of all nodes are here and do not agree: every node finds the same;
 *   - Python closes the group, because its members have changed (the *freeze*).
 *
 * Safety. A call is *committed* at a node that had all parts; others may lack them for ever.
 *   1. Calls in progress at any two nodes differ by one at most, because call k + 1 needs a part of
 *      every node, and a node gives it only after its own commit of call k.
 *   2. A node answers a change of the members (GroupSync) only after TAKEN, so what it reports
 *      stands: it commits nothing more under the old version. The leading node hears all nodes,
 *      those that lost their last member too, before anything is decided; so it learns of every
 *      commit that a living node has seen, and passes it on. TAKEN carries the last one whole.
 *   3. Parts count only for the version and the call that stand in their frame. A new version opens
 *      at the commit of a call that the leading node has decided under it, so every node that is
 *      open with a version is so with the same members and from the same call on.
 *   4. A node that has sent its parts of call k, or its vote, never sends anything else of it; nor
 *      does one that has yielded it. So two nodes never find different answers in one version.
 * Liveness. A frame is lost with its link alone. Own frames of the last two calls are kept, in any
 * state, and sent again when a link is lost; a node that needs none drops it by version and call.
 *
 * The machine has no thread, socket or clock: inputs are function calls, outputs the functions of
 * small_ports. So tests and the simulation play it step by step.
 */
#ifndef ENGINE_SMALL_H
#define ENGINE_SMALL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine_frames.h"
#include "shm_layout.h"

/* What travels between two nodes: for each member one of these, then `nbytes` bytes: a payload
 * (docs/architecture.md), whose elements begin at `offset`. */
struct small_part {
    uint32_t rank, nbytes, offset;
    uint8_t kind, op, dtype, root;
};
_Static_assert(sizeof(struct small_part) == 16, "it travels");

/* A committed call: this, then `count` places, then the payloads at their places. */
struct small_record {
    uint64_t call, ranks; /* ranks as bits */
    uint8_t kind, op, dtype, root;
    uint32_t count, nbytes, pad; /* nbytes: of all */
};
struct small_place {
    uint32_t source, nbytes, at, pad;
};
_Static_assert(sizeof(struct small_record) == 32 && sizeof(struct small_place) == 16, "as read");

/* What a frame says of a call. BEGUN is followed by VOTES or YIELDS, unless a change of the members
 * comes first; the others are a node's last word. */
enum small_phase { SMALL_GIVES, SMALL_YIELDS, SMALL_BEGUN, SMALL_VOTES, SMALL_PHASE_END };

enum {
    /* Larger calls go by stripes. Higher: each node receives so much for each call, while a stripe
     * would need 2/n of it. */
    SMALL_BYTES_MAX = SMALL_GIVEN_BYTES,
    SMALL_FRAME_BYTES_MAX = SMALL_GIVEN_BYTES + MEMBERS * (int)sizeof(struct small_part),
    SMALL_NOBODY = 0xffffffff, /* as the node of a rank */
};
_Static_assert((int)SMALL_PHASE_END == (int)FRAME_SMALL_PHASES, "what a frame may say");
_Static_assert((int)SMALL_FRAME_BYTES_MAX <= (int)FRAME_SMALL_BYTES_MAX, "a link carries it");
_Static_assert(SMALL_RECORD_BYTES >= SMALL_GIVEN_BYTES + 32 + MEMBERS * 16 + 64 &&
               SMALL_RECORD_BYTES % 64 == 0, "room for all parts of a call");

/* What a node has given to a call. `plan`: of BEGUN and VOTES, which one, as the number of Python's
 * attempt at the call (_node/groups/group_decisions.py); nodes that name the same one have the same
 * plan. */
struct small_slot {
    bool here;
    uint8_t phase;
    uint32_t plan;
    uint64_t version, call;
    uint32_t nbytes, room;
    char *parts;
};

struct small_node {
    struct small_node *next;
    uint32_t number;
    struct small_slot slots[2]; /* by the call's last bit: this call, and the one before or after */
};

/* A member of this node. */
struct small_member {
    uint64_t seq; /* of its last call that is known here, + 1 */
    struct small_part part;
    char *bytes;
    uint32_t room;
};

struct small_group {
    struct small_group *next;
    uint64_t generation;
    bool open, fresh; /* fresh: nothing committed since it was opened */
    bool yields;
    uint64_t version, call, yield_at;
    uint64_t result; /* of the call in progress, which Python moves; 0: not made yet */
    bool awaited;    /* a member waits until Python has heard of its commit, because it has lent an
                      * array, which is its own again then */
    uint32_t size, me;
    uint64_t ranks, here; /* as bits: all members, those of this node */
    uint32_t node_of[MEMBERS];
    struct small_node own; /* what this node has sent */
    struct small_node *others;
    struct small_member members[MEMBERS];
    bool has_last;
    char *last; /* a small_record */
    void *board; /* of the ports */
};

enum small_news {
    SMALL_TAKEN, /* Python owns the calls from `call` on; bytes: the last commit, or none */
    SMALL_PART,  /* that member here has made that call; bytes: a small_part and its payload. Of
                  * use only while Python owns the calls: whatever opens the group knows it, too */
    SMALL_FIRST, /* the first commit of a small call since the group was opened, or since MOVED */
    SMALL_MOVED, /* that call is committed by votes */
};

struct small_ports {
    void *context;
    /* To one other node. */
    void (*send)(void *context, struct small_group *group, uint32_t node,
                 const struct small_slot *slot);
    /* group->last is the result. */
    void (*commit)(void *context, struct small_group *group);
    /* group->result is the result of the call before group->call. */
    void (*commit_moved)(void *context, struct small_group *group);
    void (*tell)(void *context, struct small_group *group, int news, uint64_t number,
                 const void *bytes, size_t nbytes);
};

struct small_calls {
    struct small_group *groups;
    struct small_ports ports;
};

struct small_group *small_find(struct small_calls *all, uint64_t generation);
struct small_group *small_add(struct small_calls *all, uint64_t generation, uint32_t size,
                              uint32_t me);
void small_forget(struct small_calls *all, uint64_t generation);
void small_forget_all(struct small_calls *all);

/* From Python. node_of: one for each rank, or SMALL_NOBODY. */
void small_open(struct small_calls *all, struct small_group *group, uint64_t version,
                uint64_t call, const uint32_t *node_of);
void small_close(struct small_calls *all, struct small_group *group);
void small_yield(struct small_calls *all, struct small_group *group, uint64_t call);

/* Python moves that call by this plan (not 0); it has all bytes; and has made the result, which is
 * not 0. Without effect if Python owns the calls, or is about to be told so; the first two also if
 * this node has said its last word of the call (vote: false), the third if it has said nothing. */
void small_begin(struct small_calls *all, struct small_group *group, uint64_t call, uint32_t plan);
bool small_vote(struct small_calls *all, struct small_group *group, uint64_t call, uint32_t plan);
void small_result(struct small_calls *all, struct small_group *group, uint64_t call,
                  uint64_t result, bool awaited);

/* A member here has made its call; bytes: part->nbytes. */
void small_given(struct small_calls *all, struct small_group *group, uint64_t call,
                 const struct small_part *part, const char *bytes);
/* A frame of another node. NULL, or what is wrong with it. */
const char *small_receive(struct small_calls *all, uint64_t generation, uint32_t node,
                          uint64_t version, uint64_t call, uint8_t phase, uint32_t plan,
                          const char *parts, uint32_t nbytes);
/* What was sent to that node may be lost. */
void small_resend(struct small_calls *all, uint32_t node);

/* For engine_small.c, from engine_small_results.c: makes group->last of what all nodes have given to
 * the call in progress. False: the parts do not belong to one call. */
bool small_combine(struct small_group *group);
bool small_takes_part(const struct small_group *group, uint32_t number);

#endif
