"""Large arrays that functions carry along are stored as objects of their own, each value once.

A function sent by value brings its globals, closure and defaults to every worker, and what is large
among them is usually an array. The array is put like any other object and the function refers to
it; as long as the array is unchanged nothing is copied or sent again. To detect a change, the
stored copy is compared with the array itself: only the pages that were written if the kernel can
tell which these are, otherwise the whole array. So no digest is needed, which could collide.
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
from hoplite_mp._client.memory import Memory
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
    "Lending",
    "StoredCopy",
    "TrackedArray",
    "WriteWatch",
    "available",
    "lock",
]


# Watches: which bytes of an array may have been written since they were last compared.
#
# A global array travels with each task of the functions that name it, and reading 100 MB to find
# them unchanged costs more than the task. The kernel knows which pages were written (`_pages`), but
# only for private anonymous memory and whole pages, and it tells a process only once: a look
# protects the pages again, so what one watch finds must be noted for all other watches over the
# same memory. If a watch is not sure whether bytes were written, it reports them as written.


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
    """Whether the kernel can tell which pages were written, and this process may ask it."""
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

    __slots__ = ("begin", "end", "found", "nbytes", "start", "watched")

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.nbytes = start, nbytes
        self.begin = -(-start // PAGE_BYTES) * PAGE_BYTES  # the whole pages in it
        self.end = (start + nbytes) // PAGE_BYTES * PAGE_BYTES
        self.found: Ranges | None = None  # by all looks since settle(); None: anything
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
            self.found = None
            _state.watches.append(self)

    def close(self) -> None:
        """Ends the kernel's tracking, unless other watches cover parts of the memory. The memory
        may have been freed before, and belong to another watch's array by now."""
        if not self.watched:
            return
        self.watched = False
        self.found = None
        _state.watches.remove(self)
        if not self._concerned():
            _pages.unwatch(self.begin, self.end)

    def look(self) -> Ranges | None:
        """(offset, end) of bytes that may have been written; None: any of them may."""
        if not self.watched:
            return None
        concerned = self._concerned()
        known = [watch.found for watch in concerned]
        for watch in concerned:  # so that it stays in doubt if an exception interrupts this
            watch.found = None
        try:
            found = _pages.look(self.begin, self.end)
        except OSError:  # the memory was replaced, for example: unmapped, moved, mapped again
            self.close()
            self.open()
            return None
        for watch, before in zip(concerned, known, strict=True):
            full = watch is not self and len(before or ()) + len(found) > UNREAD_RANGES_MAX
            watch.found = None if before is None or full else before + found
        if self.found != [] and _pinned():
            self.close()  # devices may go on writing there, which page tables do not show
        if self.found is None:
            return None
        start, begin, end = self.start, self.begin, self.end
        edges = [(start, begin), (end, start + self.nbytes)]
        ranges = edges + [(max(low, begin), min(high, end)) for low, high in self.found]
        return [(low - start, high - start) for low, high in ranges if low < high]

    def settle(self) -> None:
        """The bytes reported by the last look have been read."""
        self.found = []

    def _concerned(self) -> list[WriteWatch]:
        """The watches over parts of this memory."""
        return [
            watch for watch in _state.watches if watch.begin < self.end and self.begin < watch.end
        ]


def _private(begin: int, end: int) -> bool:
    """Whether all of it is private memory without a file. Others may write to shared memory."""
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


# An array that was mostly rewritten at so many checks in a row is no longer watched; one that was
# unchanged at so many checks in a row without a watch is watched again.
POLLS_IN_VAIN = 3
NAMED_MAX = 1000  # how many global variables are warned about
SAME_POLLS_MAX = 8  # how many copies of the same size a new array is compared with

_log = logging.getLogger("hoplite_mp")
_numbers = itertools.count(1)


class StoredCopy:
    """A value that an array had: an object with its bytes, and a mark that no other value has."""

    __slots__ = ("__weakref__", "mark", "nbytes", "ref")

    def __init__(self, ref: ObjectRef[Any], nbytes: int, number: int) -> None:
        self.ref = ref
        self.nbytes = nbytes
        self.mark = b"copy %d" % number


class TrackedArray:
    """What is known of the array at one place in memory; lives as long as a function that was sent
    with it. It has no reference to an array that can be written to, not even a weak one, because
    numpy refuses to resize an array that is referred to. It needs none, because the memory is
    watched and compared, not the array object."""

    __slots__ = ("__weakref__", "copy", "frozen", "gone", "looks", "number", "place", "watch")

    def __init__(self, place: Any, watch: WriteWatch | None, gone: list[Any]) -> None:
        self.place = place  # address, shape, strides, dtype and class
        self.watch = watch
        self.gone = gone
        self.number = next(_numbers)
        self.copy: StoredCopy | None = None
        # At how many checks the opposite choice, to watch or not, would have been cheaper.
        self.looks = 0
        # A weak reference to the array if nobody can write to its memory.
        self.frozen: weakref.ref[Array] | None = None

    def __del__(self) -> None:
        if self.watch is not None:
            # `_forget` closes the watch, because the garbage collector may run this anywhere, for
            # example in the middle of a look.
            self.gone.append(self.watch)


class CapturedArrays:
    """The stored copies of one process's arrays."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: weakref.WeakValueDictionary[int, TrackedArray] = weakref.WeakValueDictionary()
        # By number, the newest last.
        self._copies: weakref.WeakValueDictionary[int, StoredCopy] = weakref.WeakValueDictionary()
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
        """The copy that equals the array now, and the array's TrackedArray. Each array has its
        own, and gets a new one when its address, shape, strides or dtype has changed."""
        with lock:
            self._forget()
            kept = self._kept_of(array)
            now = kept.copy
            if now is not None and kept.frozen is not None:
                return now, kept
            watch = kept.watch
            # `look` write-protects the pages before they are read here, so the next look finds a
            # write that happens meanwhile.
            ranges = None if watch is None else watch.look()
            changed = now is None or (ranges != [] and self._differs(array, now, ranges))
            if now is None or changed:
                now = kept.copy = self._same(array) or self._put(array)
            if watch is not None:
                watch.settle()
                self._judge(kept, watch, ranges or [], changed)
            return now, kept

    def _judge(self, kept: TrackedArray, watch: WriteWatch, ranges: Ranges, changed: bool) -> None:
        """Watches an array, or no longer, when the other choice would have been cheaper a few times
        in a row. If it is mostly rewritten, comparing all of it is: the first write to each
        protected page costs a fault."""
        written = sum(high - low for low, high in ranges)
        worse = written > watch.nbytes // 2 if watch.watched else not changed
        kept.looks = kept.looks + 1 if worse else 0
        if kept.looks >= POLLS_IN_VAIN:
            kept.looks = 0
            (watch.close if watch.watched else watch.open)()

    def warn(self, module: str, name: str, array: Array) -> None:
        """Warns, once for each global variable, what it costs that functions carry its array."""
        key = module, name
        if key in self._named or len(self._named) >= NAMED_MAX:
            return
        self._named.add(key)
        _log.warning(
            "the global array %s of %s (%s) travels with the functions that use it: each worker "
            "takes a copy, and another one when it has changed. To share it without copies, give "
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
        """Keeps what is known of a function's arrays as long as the function lives."""
        key, users = id(fn), self._users
        if kept:
            with contextlib.suppress(TypeError):  # the function cannot be referred to weakly
                users[key] = weakref.ref(fn, lambda _: users.pop(key, None)), kept
        else:
            users.pop(key, None)

    def bound(self, module: ModuleType, name: str, value: Any, kept: list[TrackedArray]) -> None:
        """Keeps the marks of the arrays of a module's variable as long as the variable has this
        value. Otherwise the same array would get a new mark after the last function that was sent
        with it is gone, and would overwrite values that tasks have set."""
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
        """At the end of the cluster: removes all write protection."""
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
        """An existing copy that has the same bytes by chance, or None."""
        alike = [copy for copy in self._copies.values() if copy.nbytes == array.nbytes]
        for copy in alike[: -SAME_POLLS_MAX - 1 : -1]:
            ready = self._memory.client.state(self._memory.local_id(copy.ref)) == STATE["SEALED"]
            if ready and not self._differs(array, copy, None):
                return copy
        return None

    def _put(self, array: Array) -> StoredCopy:
        number = next(_numbers)
        made = StoredCopy(self._memory.put(_flat(array)), array.nbytes, number)
        self._copies[number] = made
        return made


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
    """Whether the memory belongs to bytes or to a stored value, which are never written."""
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return type(base) in (bytes, _shm.View)


# Large arrays that a series of calls passes repeatedly are stored once.
#
# A library such as joblib sends the same array with every task, and promises that its tasks only
# read it, so one stored copy serves them all. Copies are made as for the globals of functions
# (`captured_arrays`): the kernel watches an array's memory, so neither a changed array nor a new
# one at an old one's address is mistaken for the stored one. Where the kernel cannot watch, an
# array is compared once for each call of the library.


class Lending:
    """Stores arrays, and keeps each one stored as long as the array lives or until `end()`."""

    def __init__(self, memory: Memory, nbytes_min: float) -> None:
        self._nbytes_min = nbytes_min
        self._memory = memory
        # Id of an array -> (weak reference to it, its copy, what is known of it). An entry is
        # removed with its array, so an id never stands for another array.
        self._held: dict[int, tuple[weakref.ref[Array], StoredCopy, TrackedArray]] = {}
        self._compared: set[int] = set()  # ids of arrays that were compared during the present call
        self._call: object = None

    def begin(self, call: object) -> None:
        """The library begins another call; arrays may have changed since the one before."""
        if call != self._call:
            self._call = call
            self._compared.clear()

    def end(self) -> None:
        """Releases all copies. Only tasks that still run may hold them from here on."""
        self._held.clear()
        self._compared.clear()

    def takes(self, array: Array) -> bool:
        return array.nbytes >= self._nbytes_min

    def copy_of(self, array: Array) -> tuple[StoredCopy, TrackedArray]:
        key = id(array)
        known = self._held.get(key)
        if known is not None and key in self._compared and not _watched(known[2]):
            return known[1:]
        scan: Any = self._memory.scan
        copy, kept = scan().copy_of(array)
        if known is None:
            held, compared = self._held, self._compared

            def forget(_: object) -> None:  # the garbage collector may call this anywhere
                held.pop(key, None)
                compared.discard(key)

            self._held[key] = weakref.ref(array, forget), copy, kept
        else:
            self._held[key] = known[0], copy, kept
        self._compared.add(key)
        return copy, kept


def _watched(kept: TrackedArray) -> bool:
    """Whether a check of the array is cheap, because the kernel knows which pages were written."""
    return kept.frozen is not None or (kept.watch is not None and kept.watch.watched)
