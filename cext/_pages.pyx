"""Which pages of this process's memory were written: the kernel's answer, for Python.

`pages_written.h` makes the system calls. This file keeps the two descriptors that they need, turns
their answers into lists, and releases the GIL during the calls.
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
    """Both descriptors are about the parent's memory. They are not closed here, because the program
    may have closed them and opened files of its own under the same numbers; exec closes them."""
    global uffd, pagemap
    uffd = pagemap = -1


pthread_atfork(NULL, NULL, _after_fork_in_child)


def open_watch() -> None:
    """Asks the kernel for what the rest takes; OSError where it has none, or forbids it."""
    global uffd, pagemap
    cdef int error
    if uffd < 0:
        error = pages_open(&uffd, &pagemap)
        if error:
            raise OSError(error, "the kernel does not tell which pages were written")


cdef int check(uint64_t start, uint64_t end) except -1:
    if uffd < 0:
        raise OSError(ECHILD, "open_watch() was not called in this process")
    if start >= end or (start | end) & 4095:
        raise ValueError(f"[{start:#x}, {end:#x}) are no whole pages")
    return 0


def watch(uint64_t start, uint64_t end) -> None:
    """From the next look on, what is written to these pages is known. OSError: it cannot be."""
    check(start, end)
    cdef int error
    with nogil:
        error = pages_register(uffd, start, end)
    if error:
        raise OSError(error, "these pages cannot be watched")


def unwatch(uint64_t start, uint64_t end) -> None:
    """The kernel forgets them; without effect if they are gone."""
    if uffd >= 0:
        pages_unregister(uffd, start, end)


def look(uint64_t start, uint64_t end) -> list:
    """Ranges (begin, end) that may have been written since the last look, or were never looked at.
    OSError: these pages are not watched, or were exchanged for others; what was written to any
    of them before is then unknown."""
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
            raise OSError(ENODATA, "the kernel does not go on")
        for i in range(n):
            found.append((regions[i].start, regions[i].end))
    return found


def same(uintptr_t one, uintptr_t other, size_t nbytes) -> bool:
    """Do two places in memory hold the same bytes?"""
    cdef int differs
    with nogil:
        differs = memcmp(<const void *> one, <const void *> other, nbytes)
    return not differs
