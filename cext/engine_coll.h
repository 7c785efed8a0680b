/* Small calls of Groups over several hosts: a protocol between the engines of their nodes.
 *
 * A call of a few KiB costs a millisecond if every node handles it in Python. While all members
 * make calls of one kind and shape, and none dies, there is nothing to decide: each node sends its
 * members' parts to all other nodes, and each node that has all parts has the result.
 *
 *     CLOSED ──open(version, call)──► OPEN ──TAKEN──► CLOSED        (Python owns the calls)
 *                                     │  ▲ call + 1
 *        own members have all called  ▼  │ all nodes' parts are here, and agree
 *             one frame to each other node ──► fold in the order of ranks ──► the board, members wake
 *
 * A call that is not small, whose bytes the nodes move by the plan of an earlier call
 * (_node/groups/repeated_plans.py), is committed by the same frames, as by the votes of a two-phase
 * commit. Each node names the plan when Python begins to move the bytes (*begun*), and sends
 * another frame when it has received all its bytes (*vote*). A node that has the votes of all nodes
 * for one plan, and the object that Python has made of the bytes, writes that object's id to the
 * board:
 *
 *        Python: begin(call, plan)  ▼  one frame to each other node
 *        the last cell is full,
 *        or Python: vote            ▼  one frame to each other node
 *        Python: result(object)     ▼  votes of all nodes for this plan ──► the board, member wakes
 *
 * OPEN ends, and Python gets all that it must know (TAKEN, then a PART for each call that a member
 * here has made and that is not over), when
 *   - this node *yields* call k, because a member here gives a part that no small call carries,
 *     and there is no plan to repeat. Its frame of call k then has no parts, so no node can ever
 *     have all parts of call k, and every node that receives it gives call k to Python;
 *   - this node has begun to move call k, has not voted, and another node gives parts or names
 *     another plan: it yields, because the bytes that it awaits may never come;
 *   - the parts of all nodes are here and do not agree: every node finds the same;
 *   - Python closes the Group, because its members have changed (the *freeze*).
 *
 * Safety. A call is *committed* at a node that had all parts; others may lack them forever.
 *   1. Calls in progress at any two nodes differ by one at most, because call k + 1 needs a part of
 *      every node, and a node gives it only after its own commit of call k.
 *   2. A node answers a change of the members (GroupSync) only after TAKEN, so its report is final:
 *      it commits nothing more under the old version. The leading node waits for the
 *      answers of all nodes, including those that lost their last member. So it knows every commit
 *      that a living node has seen, and passes the commit on. TAKEN has the complete last one.
 *   3. Parts count only for the version and the call in their frame. A new version opens at the
 *      commit of a call that the leading node has decided under it, so all nodes that are open with
 *      a version have the same members and the same first call.
 *   4. A node that has sent its parts of call k, or its vote, or has yielded it, never sends
 *      anything else about it. So two nodes never find different answers in one version.
 * Liveness. A frame is lost only with its link. A node keeps its frames of the last two calls, in
 * any state, and sends them again when a link is lost; a receiver drops duplicates by version and
 * call.
 *
 * The state machine has no thread, socket or clock: inputs are function calls, outputs the
 * functions of coll_ports. So tests and the simulation run it step by step.
 */
#ifndef ENGINE_COLL_H
#define ENGINE_COLL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine_frames.h"
#include "shm_layout.h"

/* A part between two nodes: for each member one of these, then `nbytes` bytes: a payload
 * (docs/architecture.md), whose elements begin at `offset`. */
struct coll_part {
    uint32_t rank, nbytes, offset;
    uint8_t kind, op, dtype, root;
};
_Static_assert(sizeof(struct coll_part) == 16, "it travels");

/* A committed call: this, then `count` places, then the payloads at their places. */
struct coll_record {
    uint64_t call, ranks; /* ranks as bits */
    uint8_t kind, op, dtype, root;
    uint32_t count, nbytes, pad; /* nbytes: of all */
};
struct coll_place {
    uint32_t source, nbytes, at, pad;
};
_Static_assert(sizeof(struct coll_record) == 32 && sizeof(struct coll_place) == 16, "as read");

/* The content of a frame about a call. BEGUN is followed by VOTES or YIELDS, unless a change of the
 * members comes first; the others are a node's last frame. */
enum coll_phase { COLL_GIVES, COLL_YIELDS, COLL_BEGUN, COLL_VOTES, COLL_PHASE_END };

enum {
    /* Larger calls use stripes. Higher: each node receives this much for each call, whereas a
     * stripe would need 2/n of it. */
    COLL_BYTES_MAX = COLL_GIVEN_BYTES,
    COLL_FRAME_BYTES_MAX = COLL_GIVEN_BYTES + MEMBERS * (int)sizeof(struct coll_part),
    COLL_NOBODY = 0xffffffff, /* as the node of a rank */
};
_Static_assert((int)COLL_PHASE_END == (int)FRAME_COLL_PHASES, "what a frame may say");
_Static_assert((int)COLL_FRAME_BYTES_MAX <= (int)FRAME_COLL_BYTES_MAX, "a link carries it");
_Static_assert(COLL_RECORD_BYTES >= COLL_GIVEN_BYTES + 32 + MEMBERS * 16 + 64 &&
               COLL_RECORD_BYTES % 64 == 0, "a record holds all parts of a call");

/* What a node has given to a call. `plan`: of BEGUN and VOTES, the number of Python's attempt at
 * the call (_node/groups/group_decisions.py); nodes with the same number have the same plan. */
struct coll_slot {
    bool here;
    uint8_t phase;
    uint32_t plan;
    uint64_t version, call;
    uint32_t nbytes, room;
    char *parts;
};

struct coll_node {
    struct coll_node *next;
    uint32_t number;
    /* by the call's last bit: this call, and the one before or after it */
    struct coll_slot slots[2];
};

/* A member of this node. */
struct coll_member {
    uint64_t seq; /* of its last call that is known here, + 1 */
    struct coll_part part;
    char *bytes;
    uint32_t room;
};

struct coll_group {
    struct coll_group *next;
    uint64_t generation;
    bool open, fresh; /* fresh: nothing was committed since it was opened */
    bool yields;
    uint64_t version, call, yield_at;
    uint64_t result; /* of the call in progress, which Python moves; 0: not made yet */
    bool awaited;    /* a member waits until Python has heard of its commit, because it has lent an
                      * array, which is its own again then */
    uint32_t size, me;
    uint64_t ranks, here; /* as bits: all members, the members of this node */
    uint32_t node_of[MEMBERS];
    struct coll_node own; /* what this node has sent */
    struct coll_node *others;
    struct coll_member members[MEMBERS];
    bool has_last;
    char *last; /* a coll_record */
    void *board; /* of the ports */
};

enum coll_news {
    COLL_TAKEN, /* Python owns the calls from `call` on; bytes: the last commit, or none */
    COLL_PART,  /* that member here has made that call; bytes: a coll_part and its payload. Of
                  * use only while Python owns the calls: whatever opens the group knows it, too */
    COLL_FIRST, /* the first commit of a small call since the Group was opened, or since MOVED */
    COLL_MOVED, /* the call is committed by votes */
};

struct coll_ports {
    void *context;
    /* To one other node. */
    void (*send)(void *context, struct coll_group *group, uint32_t node,
                 const struct coll_slot *slot);
    /* group->last is the result. */
    void (*commit)(void *context, struct coll_group *group);
    /* group->result is the result of the call before group->call. */
    void (*commit_moved)(void *context, struct coll_group *group);
    void (*tell)(void *context, struct coll_group *group, int news, uint64_t number,
                 const void *bytes, size_t nbytes);
};

struct coll_calls {
    struct coll_group *groups;
    struct coll_ports ports;
};

struct coll_group *coll_find(struct coll_calls *all, uint64_t generation);
struct coll_group *coll_add(struct coll_calls *all, uint64_t generation, uint32_t size,
                              uint32_t me);
void coll_forget(struct coll_calls *all, uint64_t generation);
void coll_forget_all(struct coll_calls *all);

/* From Python. node_of: one for each rank, or COLL_NOBODY. */
void coll_open(struct coll_calls *all, struct coll_group *group, uint64_t version,
                uint64_t call, const uint32_t *node_of);
void coll_close(struct coll_calls *all, struct coll_group *group);
void coll_yield(struct coll_calls *all, struct coll_group *group, uint64_t call);

/* Python moves that call by this plan (not 0); has all bytes; has made the result (not 0). No
 * effect if Python owns the calls, or is about to be told so; for the first two also if this node
 * has sent its last frame of the call (vote: false), for the third if it has sent none. */
void coll_begin(struct coll_calls *all, struct coll_group *group, uint64_t call, uint32_t plan);
bool coll_vote(struct coll_calls *all, struct coll_group *group, uint64_t call, uint32_t plan);
void coll_result(struct coll_calls *all, struct coll_group *group, uint64_t call,
                  uint64_t result, bool awaited);

/* A member here has made its call; bytes: part->nbytes. */
void coll_given(struct coll_calls *all, struct coll_group *group, uint64_t call,
                 const struct coll_part *part, const char *bytes);
/* Processes a frame of another node. Returns NULL, or the reason why the frame is invalid. */
const char *coll_receive(struct coll_calls *all, uint64_t generation, uint32_t node,
                          uint64_t version, uint64_t call, uint8_t phase, uint32_t plan,
                          const char *parts, uint32_t nbytes);
/* Frames to that node may have been lost. */
void coll_resend(struct coll_calls *all, uint32_t node);

/* For engine_coll.c, from engine_coll_results.c: makes group->last from the parts of all nodes for
 * the call in progress. False: the parts do not belong to one call. */
bool coll_combine(struct coll_group *group);
bool coll_takes_part(const struct coll_group *group, uint32_t number);

#endif
