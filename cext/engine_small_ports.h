/* What the engine and _engine.pyx call of small calls; engine_small.h has the protocol.
 *
 * Requests are posted as any command of the engine; the rest is called by its thread.
 */
#ifndef ENGINE_SMALL_PORTS_H
#define ENGINE_SMALL_PORTS_H

#include "engine_small.h"
#include "engine_state.h"

enum small_ask {
    SMALL_ASK_ADD,    /* generation, size, node (this one), control, board */
    SMALL_ASK_OPEN,   /* generation, version, call, node_of */
    SMALL_ASK_CLOSE,  /* generation */
    SMALL_ASK_YIELD,  /* generation, call */
    SMALL_ASK_FORGET, /* generation */
    SMALL_ASK_BEGIN,  /* generation, call, plan */
    SMALL_ASK_VOTE,   /* generation, call, plan */
    SMALL_ASK_RESULT, /* generation, call, result, awaited */
    SMALL_ASK_FRAME,  /* generation, node (its sender), version, call, phase, plan, bytes */
    SMALL_ASK_BELL,   /* generation, size (the rank), fd */
    SMALL_ASK_LOOK,   /* an engine without a thread looks at all boards */
};

typedef struct small_request {
    int kind, fd;
    uint64_t generation, version, call, result;
    uint32_t size, node, board, nbytes, plan;
    uint8_t phase;
    bool awaited;
    char *control, *bytes;
    uint32_t node_of[MEMBERS];
} small_request;

void engine_post_small(struct engine *engine, struct small_request *asked);
/* For a simulation: see shm_play in shm_object.h. */
void small_play(void *play);

#endif
