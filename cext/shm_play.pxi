# Virtual time and sleep, for a simulation of many hosts in one process: see `shm_play` in
# shm_object.h. Included by each module that waits or wakes.

from libc.stdint cimport int64_t, uint32_t, uint64_t, uintptr_t


cdef extern from "shm_object.h" nogil:
    ctypedef struct shm_play:
        uint64_t now_ns
        void (*sleep)(uint32_t *word, int64_t ns) noexcept
        void (*wake)(uint32_t *word) noexcept
    shm_play *played


cdef shm_play the_play
cdef object play_sleep = None, play_wake = None
cdef object play_error = None  # raised while a process slept; see check_signals()


cdef void sleep_in_play(uint32_t *word, int64_t ns) noexcept with gil:
    global play_error
    try:
        play_sleep(<uintptr_t> word, ns)
    except BaseException as error:  # the waiter gets it from check_signals()
        play_error = error


cdef void wake_in_play(uint32_t *word) noexcept with gil:
    play_wake(<uintptr_t> word)


def play(sleep, wake) -> None:
    """Replaces futex waits by `sleep(address, ns)`, futex wakes by `wake(address)`, and time by
    play_at(). Both None: ends that. An unread exception of an earlier play is dropped."""
    global play_sleep, play_wake, play_error, played
    play_sleep, play_wake, play_error = sleep, wake, None
    the_play.sleep, the_play.wake = sleep_in_play, wake_in_play
    played = NULL if sleep is None else &the_play


def play_at(uint64_t now_ns) -> None:
    """Sets the virtual time, in nanoseconds of the monotonic clock."""
    the_play.now_ns = now_ns
