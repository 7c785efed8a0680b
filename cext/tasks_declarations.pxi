# Cython declarations of shm_tasks.h for _tasks.pyx.

from cpython.exc cimport PyErr_CheckSignals

cdef extern from "shm_tasks.h" nogil:
    enum:
        WAIT_TIMEOUT
        WAIT_DONE
        WAIT_AGAIN
        WAIT_NEWS
        WAIT_CLOSING
    int queue_post(char *, unsigned, uint64_t)
    int queue_open(char *, unsigned, unsigned, unsigned, int)
    void queue_close(char *, unsigned)
    void wake_for_task(char *, unsigned)
    void wake_declined(char *, unsigned)
    void set_running(char *, unsigned, uint64_t)
    void release_stand_ins(char *, unsigned)
    unsigned pool_idle(char *, unsigned)
    int task_claim(char *, uint64_t, unsigned)
    uint64_t task_next(char *, unsigned, unsigned, unsigned *, uint64_t)
    uint64_t queue_take(char *, unsigned, unsigned, unsigned *)
    int wait_for(char *, unsigned, uint64_t *, int *, int, const uint16_t *, int,
                 const uint32_t *, int, uint64_t)
    void says_waiting(shm_client *, uint64_t, uint64_t, uint64_t)


cdef int check_signals() except -1:
    """Raises the exception of a signal handler."""
    global play_error
    PyErr_CheckSignals()
    if play_error is not None:
        error, play_error = play_error, None
        raise error
    return 0
