"""Watches: which bytes of an array may have been written since they were last compared.

A global array travels with each task of the functions that name it, and reading 100 MB to find them
unchanged costs more than the task. The kernel knows which pages were written (`_pages`), but only
for private anonymous memory and whole pages, and it tells a process only once: a look protects the
pages again, so what one watch finds must be noted for all other watches over the same memory. If a
watch is not sure whether bytes were written, it reports them as written.
"""

from __future__ import annotations

import contextlib
import os

from hoplite_mp import _pages
from hoplite_mp._common import locks

__all__ = ["WriteWatch", "available", "lock"]

PAGE_BYTES = 4096
MAPS, STATUS = "/proc/self/maps", "/proc/self/status"
ANONYMOUS = ("", "[heap]")
# Ranges noted for a watch that is not looked at; with more, all of its memory is compared.
UNREAD_RANGES_MAX = 4096

Ranges = list[tuple[int, int]]


class _State:
    """The state of this module, which a forked child begins anew."""

    def __init__(self) -> None:
        self.usable: bool | None = None  # None: not tried yet
        self.watches: list[WriteWatch] = []


_state = _State()
# Held from a look until its result has been used. A second thread that looked meanwhile would find
# nothing written, and take an outdated comparison for a current one.
lock = locks.rlock("client.written_pages")


def _forked() -> None:
    """Resets the state in a forked child: its memory is its own and not watched, and a thread that
    does not exist there may hold the lock."""
    global lock
    lock = locks.rlock("client.written_pages")
    _state.usable = None
    for watch in _state.watches:
        watch.watched = False
    _state.watches = []


os.register_at_fork(after_in_child=_forked)


def available() -> bool:
    """Can the kernel tell which pages were written, and may this process ask it?"""
    if _state.usable is None:
        try:
            _pages.open_watch()
            _state.usable = True
        except OSError:
            _state.usable = False
    return _state.usable


class WriteWatch:
    """A watch over a piece of memory that stays in place; to be used under `lock`.

    look() tells what may have been written since the last settle(), and tells it again until
    settle() is called, so nothing is forgotten if the caller is interrupted.
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
        """From the next look on, the kernel tracks writes, if that is possible."""
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
        """Ends the kernel's tracking, unless other watches cover parts of the memory. The memory
        may have been freed before, and belong to another watch's array by now."""
        if not self.watched:
            return
        self.watched = False
        self.doubt = True
        _state.watches.remove(self)
        if not self._others():
            _pages.unwatch(self.begin, self.end)

    def look(self) -> Ranges | None:
        """(offset, end) of bytes that may have been written; None: any of them may."""
        if not self.watched:
            return None
        concerned = [self, *self._others()]
        doubts = [watch.doubt for watch in concerned]
        for watch in concerned:  # so that it stays in doubt if an exception interrupts this
            watch.doubt = True
        try:
            found = _pages.look(self.begin, self.end)
        except OSError:  # the memory was replaced, for example: unmapped, moved, mapped again
            self.close()
            self.open()
            return None
        for watch, doubt in zip(concerned, doubts, strict=True):
            if watch is not self and len(watch.found) + len(found) > UNREAD_RANGES_MAX:
                watch.found = []  # too many ranges: it stays in doubt
                continue
            watch.found += found
            watch.doubt = doubt
        if self.found and _pinned():  # `found` may be from another watch's look
            self.close()  # devices may go on writing there, which page tables do not show
        if self.doubt:
            return None
        edges = [(0, self.begin - self.start), (self.end - self.start, self.nbytes)]
        return [(low, high) for low, high in edges if low < high] + self._inside()

    def _inside(self) -> Ranges:
        start = self.start
        clipped = ((max(low, self.begin), min(high, self.end)) for low, high in self.found)
        return [(low - start, high - start) for low, high in clipped if low < high]

    def settle(self) -> None:
        """The bytes reported by the last look have been read."""
        self.found = []
        self.doubt = False

    def _others(self) -> list[WriteWatch]:
        return [
            watch
            for watch in _state.watches
            if watch is not self and watch.begin < self.end and self.begin < watch.end
        ]


def _private(begin: int, end: int) -> bool:
    """Is all of it private memory without a file? Other processes may write to shared memory."""
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
    """Does this process have memory that devices write to unseen by its page tables: buffers
    registered with io_uring, RDMA or VFIO?"""
    with open(STATUS) as status:
        return any(line.startswith("VmPin:") and int(line.split()[1]) for line in status)
