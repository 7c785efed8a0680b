"""Reports, from the kernel, which pages of this process's memory were written.

`pages_written.h` makes the system calls. This file keeps their two descriptors, turns the results
into lists, and releases the GIL during the calls.
"""
from libc.errno cimport ECHILD, ENODATA
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcmp

cdef extern from "pages_written.h" nogil:
    enum:
        PAGES_REGIONS
    ctypedef struct pages_region:
        uint64_t start
        uint64_t end
    int pages_open(int *, int *)
    int pages_register(int, uint64_t, uint64_t)
    void pages_unregister(int, uint64_t, uint64_t)
    long pages_scan(int, uint64_t *, uint64_t, pages_region *)
cdef extern from "pthread.h" nogil:
    int pthread_atfork(void (*)() noexcept nogil, void (*)() noexcept nogil,
                       void (*)() noexcept nogil)

cdef int uffd = -1, pagemap = -1


cdef void _after_fork_in_child() noexcept nogil:
    """Both descriptors refer to the parent's memory. They are not closed here, because the program
    may have closed them and opened its own files under the same numbers; exec closes them."""
    global uffd, pagemap
    uffd = pagemap = -1


pthread_atfork(NULL, NULL, _after_fork_in_child)


def open_watch() -> None:
    """Opens the descriptors. OSError: the kernel lacks the feature, or forbids it."""
    global uffd, pagemap
    cdef int error
    if uffd < 0:
        error = pages_open(&uffd, &pagemap)
        if error:
            raise OSError(error, "the kernel does not report written pages")


cdef int check(uint64_t start, uint64_t end) except -1:
    if uffd < 0:
        raise OSError(ECHILD, "open_watch() was not called in this process")
    if start >= end or (start | end) & 4095:
        raise ValueError(f"[{start:#x}, {end:#x}) are not whole pages")
    return 0


def watch(uint64_t start, uint64_t end) -> None:
    """Watches these pages from the next look() on. OSError: they cannot be watched."""
    check(start, end)
    cdef int error
    with nogil:
        error = pages_register(uffd, start, end)
    if error:
        raise OSError(error, "these pages cannot be watched")


def unwatch(uint64_t start, uint64_t end) -> None:
    """Stops watching; no effect if the pages are gone."""
    if uffd >= 0:
        pages_unregister(uffd, start, end)


def look(uint64_t start, uint64_t end) -> list:
    """Ranges (begin, end) that may have been written since the last call, or were never looked at.
    OSError: these pages are not watched, or were replaced; earlier writes to them are then
    unknown."""
    check(start, end)
    cdef pages_region regions[PAGES_REGIONS]
    cdef uint64_t at = start, before
    cdef long n = 0, i
    cdef list found = []
    while at < end:
        before = at
        with nogil:
            n = pages_scan(pagemap, &at, end, regions)
        if n < 0:
            raise OSError(-n, "these pages are not watched")
        if at <= before:
            raise OSError(ENODATA, "the kernel makes no progress")
        for i in range(n):
            found.append((regions[i].start, regions[i].end))
    return found


def same(uintptr_t one, uintptr_t other, size_t nbytes) -> bool:
    """Whether two places in memory have the same bytes."""
    cdef int differs
    with nogil:
        differs = memcmp(<const void *> one, <const void *> other, nbytes)
    return not differs
