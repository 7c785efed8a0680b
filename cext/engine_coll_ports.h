/* The functions of small calls for the engine and _engine.pyx; engine_coll.h has the protocol.
 *
 * Requests are posted like any command of the engine. Its thread calls the rest.
 */
#ifndef ENGINE_COLL_PORTS_H
#define ENGINE_COLL_PORTS_H

#include "engine_coll.h"
#include "engine_state.h"

enum coll_ask {
    COLL_ASK_ADD,    /* generation, size, node (this one), control, board */
    COLL_ASK_OPEN,   /* generation, version, call, node_of */
    COLL_ASK_CLOSE,  /* generation */
    COLL_ASK_YIELD,  /* generation, call */
    COLL_ASK_FORGET, /* generation */
    COLL_ASK_BEGIN,  /* generation, call, plan */
    COLL_ASK_VOTE,   /* generation, call, plan */
    COLL_ASK_RESULT, /* generation, call, result, awaited */
    COLL_ASK_FRAME,  /* generation, node (its sender), version, call, phase, plan, bytes */
    COLL_ASK_BELL,   /* generation, size (the rank), fd */
    COLL_ASK_LOOK,   /* an engine without a thread checks all boards */
};

typedef struct coll_request {
    int kind, fd;
    uint64_t generation, version, call, result;
    uint32_t size, node, board, nbytes, plan;
    uint8_t phase;
    bool awaited;
    char *control, *bytes;
    uint32_t node_of[MEMBERS];
} coll_request;

void engine_post_coll(struct engine *engine, struct coll_request *asked);
/* For a simulation: see shm_play in shm_object.h. */
void coll_play(void *play);

#endif
