"""Stores the large arrays that functions capture as separate objects, each value once.

A function sent by value contains its globals, closure and defaults; the large values among them are
usually arrays. Each of these arrays is put like any other object, and the function refers to the
object. As long as an array is unchanged, no bytes are copied or sent again. To detect a change, the
array is compared with its stored copy: only the written pages if the kernel reports them, otherwise
the whole array. Digests are not used, because they could collide.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp import _pages, _shm
from hoplite_mp._common import locks
from hoplite_mp._common.clock import FOREVER_NS
from hoplite_mp._common.machine_limits import format_bytes
from hoplite_mp._common.object_states import STATE
from hoplite_mp._serialize import raw_bytes
from hoplite_mp.errors import ObjectLostError

if TYPE_CHECKING:
    from types import ModuleType

    from hoplite_mp._client.memory import Memory
    from hoplite_mp._common.ref import ObjectRef
    from hoplite_mp._serialize import Array

__all__ = [
    "CapturedArrays",
    "StoredCopy",
    "TrackedArray",
    "WriteWatch",
    "available",
    "lock",
]


# Watches report which bytes of an array may have been written since the last comparison.
#
# A global array is checked at each submit of a function that uses the array, and comparing 100 MB
# takes longer than the task. The kernel reports written pages (`_pages`), but only for whole pages
# of private anonymous memory, and each write only once, because `look` protects the pages again.
# Writes that one watch finds are therefore hidden from all other watches over the same memory. In
# case of doubt, a watch reports bytes as written.


PAGE_BYTES = 4096
MAPS, STATUS = "/proc/self/maps", "/proc/self/status"
ANONYMOUS = ("", "[heap]")

Ranges = list[tuple[int, int]]


class _State:
    """The state of this module, which is reset in a forked child."""

    def __init__(self) -> None:
        self.usable: bool | None = None  # None: not tried yet
        self.watches: list[WriteWatch] = []


_state = _State()
# Held from a call to `look` until its result has been used. Otherwise, a second thread could call
# `look` in the meantime, find no written pages, and rely on an outdated comparison.
lock = locks.rlock("client.written_pages")


def _forked() -> None:
    """Resets the state in a forked child. The child's memory is separate and not watched, and a
    thread that does not exist in the child may hold the lock."""
    global lock
    lock = locks.rlock("client.written_pages")
    _state.usable = None
    for watch in _state.watches:
        watch.watched = False
    _state.watches = []


os.register_at_fork(after_in_child=_forked)


def available() -> bool:
    """Whether the kernel can report written pages to this process."""
    if _state.usable is None:
        try:
            _pages.open_watch()
            _state.usable = True
        except OSError:
            _state.usable = False
    return _state.usable


class WriteWatch:
    """A watch over memory with a fixed address; to be used under `lock`.

    `look` returns the ranges that may have been written since the last `settle`. Until the next
    `settle`, everything counts as written, so nothing is lost if the caller is interrupted.
    """

    __slots__ = ("begin", "end", "nbytes", "settled", "start", "watched")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self.begin = -(-start // PAGE_BYTES) * PAGE_BYTES  # whole pages within the range
        self.end = (start + nbytes) // PAGE_BYTES * PAGE_BYTES
        self.settled = False  # whether all writes before the last `look` were handled
        self.watched = False

    def open(self) -> None:
        """Starts the kernel's tracking of writes, if possible. Tracking begins with the next
        `look`."""
        if self.watched or self.end <= self.begin or not available():
            return
        if _pinned() or not _private(self.begin, self.end):
            return
        with contextlib.suppress(OSError):
            _pages.watch(self.begin, self.end)
            self.watched = True
            self.settled = False
            _state.watches.append(self)

    def close(self) -> None:
        """Ends the kernel's tracking, unless other watches cover parts of the memory. The memory
        may have been freed already, and may now belong to another watched array."""
        if not self.watched:
            return
        self.watched = False
        _state.watches.remove(self)
        if not self._others():
            _pages.unwatch(self.begin, self.end)

    def look(self) -> Ranges | None:
        """(offset, end) of each range that may have been written; None: all bytes may have been
        written."""
        if not self.watched:
            return None
        watches = [self, *self._others()]
        settled = [watch.settled for watch in watches]
        for watch in watches:  # remains False if an exception interrupts this method
            watch.settled = False
        try:
            found = _pages.look(self.begin, self.end)
        except OSError:  # for example, the memory was unmapped and mapped again
            self.close()
            self.open()
            return None
        if not found:
            for watch, before in zip(watches[1:], settled[1:], strict=True):
                watch.settled = before
        elif _pinned():
            self.close()  # devices may also write there, unseen by page tables
            return None
        if not settled[0]:
            return None
        start, begin, end = self.start, self.begin, self.end
        edges = [(start, begin), (end, start + self.nbytes)]
        return [(low - start, high - start) for low, high in edges + found if low < high]

    def settle(self) -> None:
        """Records that the ranges returned by the last `look` have been compared."""
        self.settled = True

    def _others(self) -> list[WriteWatch]:
        """The other watches that overlap with this watch."""
        return [
            watch
            for watch in _state.watches
            if watch is not self and watch.begin < self.end and self.begin < watch.end
        ]


def _private(begin: int, end: int) -> bool:
    """Whether the whole range is private memory without a file. Other processes may write to shared
    memory."""
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
    """Whether devices may write to this process's memory without marking its pages as written, for
    example to buffers registered with io_uring, RDMA or VFIO."""
    with open(STATUS) as status:
        return any(line.startswith("VmPin:") and int(line.split()[1]) for line in status)


# An array's watch is closed after this number of consecutive checks that found the array mostly
# rewritten. It is opened again after as many checks that found the array unchanged.
POLLS_IN_VAIN = 3
SAME_POLLS_MAX = 8  # number of copies of the same size to compare with a new array

_log = logging.getLogger("hoplite_mp")
_numbers = itertools.count(1)


class StoredCopy:
    """The stored value of an array: an object with the bytes, and a unique mark."""

    __slots__ = ("mark", "nbytes", "ref")

    def __init__(self, ref: ObjectRef[Any], nbytes: int) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.mark = b"copy %d" % next(_numbers)


class TrackedArray:
    """The state of an array at one address, kept as long as a function that was sent with the
    array. It has no reference to a writable array, not even a weak one, because numpy refuses to
    resize an array that has other references. None is needed, because the memory is watched and
    compared, not the array object."""

    __slots__ = ("__weakref__", "copy", "frozen", "gone", "looks", "place", "watch")

    def __init__(self, place: Any, watch: WriteWatch | None, gone: list[Any]) -> None:
        self.place = place  # address, shape, strides, dtype and class
        self.watch = watch
        self.gone = gone
        self.copy: StoredCopy | None = None
        # Consecutive checks at which the opposite choice (to watch or not to watch) would have been
        # cheaper.
        self.looks = 0
        # A weak reference to the array if its memory cannot be written.
        self.frozen: weakref.ref[Array] | None = None

    def __del__(self) -> None:
        if self.watch is not None:
            # `_forget` closes the watch, because the garbage collector may call this method at any
            # time, for example during `look`.
            self.gone.append(self.watch)


class CapturedArrays:
    """The stored copies of one process's arrays."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: weakref.WeakValueDictionary[int, TrackedArray] = weakref.WeakValueDictionary()
        self._gone: list[WriteWatch] = []
        self._users: dict[int, tuple[weakref.ref[Any], list[TrackedArray]]] = {}
        # (id of a module, name) -> the module, the id of the variable's value, its arrays.
        self._bound: dict[
            tuple[int, str], tuple[weakref.ref[ModuleType], int, list[TrackedArray]]
        ] = {}
        self.nbytes_min = memory.config.captured_array_bytes_min
        self._named: set[tuple[str, str]] = set()
        self.bytes_compared = 0  # bytes that were read to find changes

    def copy_of(self, array: Array) -> tuple[StoredCopy, TrackedArray]:
        """The copy that equals the array's present value, and the array's TrackedArray. An array
        gets a new TrackedArray when its address, shape, strides or dtype has changed."""
        with lock:
            self._forget()
            kept = self._kept_of(array)
            now = kept.copy
            if now is not None and kept.frozen is not None:
                return now, kept
            watch = kept.watch
            # `look` write-protects the pages before they are compared, so the next `look` finds
            # writes during the comparison.
            ranges = None if watch is None else watch.look()
            changed = now is None or (ranges != [] and self._differs(array, now, ranges))
            if now is None or changed:
                now = kept.copy = self._same(array) or self._put(array)
            if watch is not None:
                watch.settle()
                self._reconsider_watch(kept, watch, ranges or [], changed)
            return now, kept

    def _reconsider_watch(
        self, kept: TrackedArray, watch: WriteWatch, ranges: Ranges, changed: bool
    ) -> None:
        """Opens or closes the watch of an array if the opposite choice would have been cheaper a
        few times in a row. For an array that is mostly rewritten, a full comparison is cheaper,
        because the first write to each protected page costs a page fault."""
        written = sum(high - low for low, high in ranges)
        worse = written > watch.nbytes // 2 if watch.watched else not changed
        kept.looks = kept.looks + 1 if worse else 0
        if kept.looks >= POLLS_IN_VAIN:
            kept.looks = 0
            (watch.close if watch.watched else watch.open)()

    def warn(self, module: str, name: str, array: Array) -> None:
        """Warns about the cost of a captured array, once for each global variable."""
        key = module, name
        if key in self._named:
            return
        self._named.add(key)
        _log.warning(
            "the global array %s of %s (%s) is sent with the functions that use it: each worker "
            "gets a copy, and another copy after a change. To share the array without copies, pass "
            "ref = c.put(%s) to submit as an argument.",
            name, module, format_bytes(array.nbytes), name,
        )  # fmt: skip

    def _kept_of(self, array: Array) -> TrackedArray:
        key = id(array)
        kept = self._kept.get(key)
        address, readonly = array.__array_interface__["data"]
        place = address, array.shape, array.strides, array.dtype, type(array)
        known = kept is not None and kept.place == place
        if known and kept and (kept.frozen is None or kept.frozen() is array):
            return kept
        flags = array.flags
        contiguous = flags.c_contiguous or flags.f_contiguous
        watch = WriteWatch(address, array.nbytes) if contiguous else None
        kept = self._kept[key] = TrackedArray(place, watch, self._gone)
        if readonly and _immutable(array):
            kept.frozen = weakref.ref(array)
        elif watch is not None:
            watch.open()
        return kept

    def hold(self, fn: Any, kept: list[TrackedArray]) -> None:
        """Keeps the TrackedArrays of a function's arrays as long as the function exists."""
        key, users = id(fn), self._users
        if kept:
            with contextlib.suppress(TypeError):  # the function does not support weak references
                users[key] = weakref.ref(fn, lambda _: users.pop(key, None)), kept
        else:
            users.pop(key, None)

    def bound(self, module: ModuleType, name: str, value: Any, kept: list[TrackedArray]) -> None:
        """Keeps the marks of the arrays in a module's variable as long as the variable has this
        value. Otherwise, an array would get a new mark once the last function sent with it is gone.
        Sending the array again would then overwrite values that tasks have assigned."""
        if not kept and not self._bound:
            return
        with lock:
            for (key, other), (ref, number, _) in list(self._bound.items()):
                found = ref()
                if found is None or id(found.__dict__.get(other)) != number:
                    del self._bound[key, other]
            if kept:
                self._bound[id(module), name] = weakref.ref(module), id(value), kept
            else:
                self._bound.pop((id(module), name), None)

    def _forget(self) -> None:
        while self._gone:
            self._gone.pop().close()

    def close(self) -> None:
        """Removes all write protection. Called when the cluster is closed."""
        with lock:
            self._forget()
            for kept in list(self._kept.values()):
                if kept.watch is not None:
                    kept.watch.close()
            self._kept.clear()
            self._users.clear()
            self._bound.clear()

    def _differs(self, array: Array, copy: StoredCopy, ranges: Ranges | None) -> bool:
        try:
            stored: Array = self._memory.read(self._memory.local_id(copy.ref), FOREVER_NS, False)
        except ObjectLostError:
            return True
        flat = _flat(array)
        at, there = _address(flat), _address(stored)
        for low, high in [(0, copy.nbytes)] if ranges is None else ranges:
            self.bytes_compared += high - low
            if not _pages.same(at + low, there + low, high - low):
                return True
        return False

    def _same(self, array: Array) -> StoredCopy | None:
        """Another array's copy that happens to have the same bytes; None if there is none."""
        copies = [kept.copy for kept in self._kept.values() if kept.copy is not None]
        alike = dict.fromkeys(copy for copy in copies if copy.nbytes == array.nbytes)
        for copy in list(alike)[: -SAME_POLLS_MAX - 1 : -1]:
            ready = self._memory.client.state(self._memory.local_id(copy.ref)) == STATE["SEALED"]
            if ready and not self._differs(array, copy, None):
                return copy
        return None

    def _put(self, array: Array) -> StoredCopy:
        return StoredCopy(self._memory.put(_flat(array)), array.nbytes)


def _flat(array: Array) -> Array:
    """The array's bytes in memory order; a copy if the array is not contiguous."""
    flags = array.flags
    if not (flags.c_contiguous or flags.f_contiguous):
        array = np.array(array, order="C", copy=True, subok=False)
    return np.frombuffer(raw_bytes(array).raw(), np.uint8)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _immutable(array: Array) -> bool:
    """Whether the memory belongs to a bytes object or to a stored value, which are never
    written."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return type(base) in (bytes, _shm.View)
