"""Watches: which bytes of an array in this process's memory may have been written since a look.

Why it exists: a global array travels with each task of the functions that name it, and reading
100 MB to find that they are what they were costs more than the task. The kernel knows which pages
were written (`_pages`), but only for private anonymous memory, only whole pages, and once for the
whole process: a look protects the pages again, so what one watch finds is noted for every other
one over the same memory. What a watch cannot be sure of it calls written, never the contrary.
It must never know: what the bytes mean, who compares them with what.
"""

from __future__ import annotations

import contextlib
import os
import threading

from hoplite_mp import _pages

__all__ = ["Watch", "available", "lock"]

PAGE_BYTES = 4096
MAPS, STATUS = "/proc/self/maps", "/proc/self/status"
ANONYMOUS = ("", "[heap]")
UNREAD_RANGES_MAX = 4096  # noted for a watch that is not looked at: then all is read instead

Ranges = list[tuple[int, int]]


class _State:
    """Of this process."""

    def __init__(self) -> None:
        self.usable: bool | None = None  # None: not tried yet
        self.watches: list[Watch] = []


_state = _State()
# Held from a look until its finder knows what to make of it: a second thread that looks meanwhile
# would find nothing written, and take what was read before for the present.
lock = threading.RLock()


def _forked() -> None:
    """The child's memory is another one, and the lock may be held by a thread that it has not."""
    global lock
    lock = threading.RLock()
    _state.usable = None
    for watch in _state.watches:
        watch.watched = False
    _state.watches = []


os.register_at_fork(after_in_child=_forked)


def available() -> bool:
    """Does the kernel tell which pages were written, and may this process ask?"""
    if _state.usable is None:
        try:
            _pages.open_watch()
            _state.usable = True
        except OSError:
            _state.usable = False
    return _state.usable


class Watch:
    """One reader's watch over a piece of memory that stays where it is; to be used under `lock`.

    look() says what may have been written since the last settle(); it says so again until
    settle() is called, so nothing is forgotten if the reader is interrupted.
    """

    __slots__ = ("begin", "doubt", "end", "found", "nbytes", "start", "watched")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self.begin = -(-start // PAGE_BYTES) * PAGE_BYTES  # the whole pages in it
        self.end = (start + nbytes) // PAGE_BYTES * PAGE_BYTES
        self.found: Ranges = []
        self.doubt = True  # anything may have been written
        self.watched = False

    def open(self) -> None:
        """From the next look on the kernel is asked, if it can be."""
        if self.watched or self.end <= self.begin or not available():
            return
        if _pinned() or not _private(self.begin, self.end):
            return
        with contextlib.suppress(OSError):
            _pages.watch(self.begin, self.end)
            self.watched = True
            self.doubt = True
            _state.watches.append(self)

    def close(self) -> None:
        """The kernel need not look after it any longer. Before its memory is given back, or after:
        what others watch there by then is left alone."""
        if not self.watched:
            return
        self.watched = False
        self.doubt = True
        _state.watches.remove(self)
        if not self._others():
            _pages.unwatch(self.begin, self.end)

    def look(self) -> Ranges | None:
        """(offset, end) of what may have been written, in bytes from the start; None: anything."""
        if not self.watched:
            return None
        concerned = [self, *self._others()]
        doubts = [watch.doubt for watch in concerned]
        for watch in concerned:  # until all have been told: an exception may come in between
            watch.doubt = True
        try:
            found = _pages.look(self.begin, self.end)
        except OSError:  # the memory was exchanged for other, say: unmapped, moved, mapped again
            self.close()
            self.open()
            return None
        for watch, doubt in zip(concerned, doubts, strict=True):
            if watch is not self and len(watch.found) + len(found) > UNREAD_RANGES_MAX:
                watch.found = []  # and it stays in doubt
                continue
            watch.found += found
            watch.doubt = doubt
        if self.found and _pinned():  # also what another watch's look has found
            self.close()  # a device may go on writing there, which no page table shows
        if self.doubt:
            return None
        edges = [(0, self.begin - self.start), (self.end - self.start, self.nbytes)]
        return [(low, high) for low, high in edges if low < high] + self._inside()

    def _inside(self) -> Ranges:
        start = self.start
        clipped = ((max(low, self.begin), min(high, self.end)) for low, high in self.found)
        return [(low - start, high - start) for low, high in clipped if low < high]

    def settle(self) -> None:
        """What the last look found has been read."""
        self.found = []
        self.doubt = False

    def _others(self) -> list[Watch]:
        return [
            watch
            for watch in _state.watches
            if watch is not self and watch.begin < self.end and self.begin < watch.end
        ]


def _private(begin: int, end: int) -> bool:
    """Is all of it private memory of no file? What is shared may be written by others."""
    covered = begin
    with open(MAPS) as maps:
        for line in maps:
            place, rights, _, _, inode, *name = line.split(None, 5)
            low, high = (int(side, 16) for side in place.split("-"))
            if high <= begin or low >= end:
                continue
            named = name[0].strip() if name else ""
            anonymous = inode == "0" and (named in ANONYMOUS or named.startswith("[anon:"))
            if low > covered or not anonymous or rights[:2] != "rw" or rights[3] != "p":
                return False
            covered = high
    return covered >= end


def _pinned() -> bool:
    """Does this process have memory that devices write to without its page tables: buffers
    registered with io_uring, RDMA, VFIO?"""
    with open(STATUS) as status:
        return any(line.startswith("VmPin:") and int(line.split()[1]) for line in status)
