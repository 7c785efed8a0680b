"""A checker for the order in which threads acquire locks, like Linux's lockdep.

Locks are identified by name, so all Futures' locks count as one. Acquiring a lock while holding
another adds an edge to a graph, and a cycle in this graph is reported even if no thread had to
wait. The checker also reports violations of `Checker.order`, waits under locks that do not allow
them, messages sent under a lock that a reply's handler acquires, and user functions called under a
lock.

If a finalizer in the garbage collector acquires a lock, the edge is a finalizer edge. Finalizers
may run under any lock, but only one thread runs the collector at a time. So a cycle is reported
only if it has at most one finalizer edge, and a finalizer edge alone does not violate the order.

A signal handler may raise an exception between any two Python steps, and `with` must still release
the lock. So locks are released by inherited C code, and the locks that a thread holds are
determined when it acquires the next one.
"""

from __future__ import annotations

import _thread
import gc
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import CodeType

__all__ = ["Checker", "LockOrderError"]

FRAMES_MAX = 20  # maximum number of frames kept for each stack
# The standard library acquires the conditions of several Futures together, sorted by id.
SAME_NAME = frozenset({"client.future"})
_log = logging.getLogger("hoplite_mp")

Stack = tuple[tuple["CodeType", int], ...]


class LockOrderError(RuntimeError):
    """A thread would wait for a lock that it already holds."""


class HeldLock(NamedTuple):
    """A lock that a thread holds."""

    lock: CheckedLock
    stack: Stack
    collecting: bool  # whether a finalizer acquired it, in the garbage collector


class Edge(NamedTuple):
    """The first time that a thread acquired one lock while it held another."""

    held: Stack
    taken: Stack
    thread: str


class CheckedLock(_thread.RLock):  # type: ignore[misc]  # declared final; it is not
    """A lock that reports to a checker. Even a lock that is not reentrant is an RLock, because an
    RLock stores its holder. Acquiring such a lock twice is an error."""

    checker: Checker
    name: str
    reentrant: bool

    if TYPE_CHECKING:

        def _is_owned(self) -> bool: ...

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        owned = self._is_owned()
        if owned and not self.reentrant:
            if not blocking:
                return False
            if timeout >= 0:
                time.sleep(timeout)
                return False
            raise LockOrderError(self.checker.taken_twice(self))
        if blocking and not owned:
            self.checker.before(self)
        got: list[bool] = []
        try:
            # A single C step, so no signal handler runs between acquiring the lock and recording
            # it.
            got.extend(map(super().acquire, (blocking,), (timeout,)))
            if got[0] and not owned:
                self.checker.after(self)
        except BaseException:
            if got and got[0]:
                self.release()
            raise
        return got[0]

    # Not a method that calls `acquire`, because a signal handler may run after each step.
    __enter__ = acquire

    def locked(self) -> bool:
        if self._is_owned():
            return True
        if super().acquire(False):
            self.release()
            return False
        return True


class _Thread(threading.local):
    """The locks that a thread has acquired. Some may have been released in the meantime."""

    def __init__(self) -> None:
        self.held: list[HeldLock] = []


class Checker:
    """The graph of a process's locks."""

    def __init__(self, order: Mapping[str, bool] | None = None, where: str = "1") -> None:
        """order: for each lock name, from the outermost to the innermost, whether the holder may
        wait. If None, any name is allowed, and only cycles are reported. where: a directory for the
        findings, or "1"."""
        self.order = order
        self._rank = {} if order is None else {name: at for at, name in enumerate(order)}
        self._where = where if os.path.isdir(where) else ""
        self.findings: list[str] = []
        self._seen: set[tuple[str, ...]] = set()  # keys of reported findings
        self._edges: dict[tuple[str, str], Edge] = {}
        self._finalizer_edges: dict[tuple[str, str], Edge] = {}
        self._local = _Thread()
        self._collecting = 0  # the thread that is running the garbage collector
        gc.callbacks.append(self._on_collection)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A forked child recreates its locks, so it holds none."""
        self._local, self._collecting = _Thread(), 0

    def close(self) -> None:
        """Stops this checker. For tests."""
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: object) -> None:
        self._collecting = threading.get_ident() if phase == "start" else 0

    # -- locks -----------------------------------------------------------------------------------

    def _made(self, name: str, reentrant: bool) -> Any:
        if self.order is not None and name not in self._rank:
            raise KeyError(f"{name!r} is not in the table ORDER of hoplite_mp/_common/locks.py")
        lock = CheckedLock()
        lock.checker, lock.name, lock.reentrant = self, name, reentrant
        return lock

    def lock(self, name: str) -> threading.Lock:
        """A lock."""
        return cast("threading.Lock", self._made(name, False))

    def rlock(self, name: str) -> threading.RLock:
        """A lock that its holder may acquire again."""
        return cast("threading.RLock", self._made(name, True))

    def condition(self, name: str) -> threading.Condition:
        """A condition with its own lock, which the holder may acquire again."""
        return threading.Condition(self._made(name, True))

    # -- events of threads -----------------------------------------------------------------------

    def _held(self) -> list[HeldLock]:
        held = self._local.held
        if held and not all(entry.lock._is_owned() for entry in held):
            held = self._local.held = [entry for entry in held if entry.lock._is_owned()]
        return held

    def before(self, lock: CheckedLock) -> None:
        """Called before the thread acquires the lock."""
        for held in self._held():
            self._edge(held, lock.name)

    def after(self, lock: CheckedLock) -> None:
        """Called after the thread has acquired the lock."""
        collecting = self._collecting == threading.get_ident()
        self._local.held.append(HeldLock(lock, _stack(), collecting))

    def taken_twice(self, lock: CheckedLock) -> str:
        """Reports that a thread acquires a lock that it already holds, which would deadlock."""
        held = next((entry for entry in self._held() if entry.lock is lock), None)
        earlier = "" if held is None else _part(f"{lock.name} was taken at", held.stack)
        now = _part("and again at", _stack())
        return self._report((lock.name,) * 2, f"{lock.name} is taken twice\n{earlier}{now}")

    def sends(self, channel: str) -> None:
        """Called when the thread sends a message without a reply. Handlers of replies run under the
        lock `channel`, and must not acquire a lock that is held here."""
        for held in self._held():
            self._edge(held, channel)

    def waits(self, what: str) -> None:
        """Called before the thread waits for the node or for an object."""
        collecting = self._collecting == threading.get_ident()
        for held in self._held():
            name = held.lock.name
            if self.order is None or self.order[name] or (collecting and not held.collecting):
                continue
            found = f"a wait for {what} under {name}, which does not allow waits\n"
            found += _part(f"{name} was taken at", held.stack) + _part("the wait is at", _stack())
            self._report(("wait", name), found)

    def calls_user_code(self, what: str) -> None:
        """Called before the thread calls a user's function, which may acquire any lock."""
        for held in self._held():
            name = held.lock.name
            found = f"{what} called under {name}\n"
            found += _part(f"{name} was taken at", held.stack) + _part("the call is at", _stack())
            self._report(("user code", name), found)

    # -- the graph -------------------------------------------------------------------------------

    def _edge(self, held: HeldLock, name: str) -> None:
        """Called when the thread acquires a lock with this name while it holds another."""
        pair = held.lock.name, name
        if pair in self._edges:
            return
        by_finalizer = self._collecting == threading.get_ident() and not held.collecting
        edges = self._finalizer_edges if by_finalizer else self._edges
        if pair in edges:
            return
        edge = edges[pair] = Edge(held.stack, _stack(), threading.current_thread().name)
        if pair[0] == name:
            if name not in SAME_NAME:
                self._report(pair, f"two locks named {name} at a time\n{_words(pair, edge)}")
            return
        cycle = self._path(name, pair[0], by_finalizer)
        if cycle:
            steps = "".join(_words(step, self._found(step)) for step in cycle)
            what = "a finalizer takes" if by_finalizer else "a thread takes"
            self._report(
                pair, f"{what} {name} under {pair[0]}: a cycle\n{_words(pair, edge)}{steps}"
            )
        elif not by_finalizer and self._rank.get(name, 0) < self._rank.get(pair[0], 0):
            self._report(
                pair, f"{name} under {pair[0]}, which must be taken later\n{_words(pair, edge)}"
            )

    def _found(self, pair: tuple[str, str]) -> Edge:
        return self._edges.get(pair) or self._finalizer_edges[pair]

    def _path(self, start: str, end: str, finalizer: bool) -> list[tuple[str, str]]:
        """The edges of a path from one lock to another. The path has at most one finalizer edge, or
        none if `finalizer` is True, because then the edge that closes the cycle is one."""
        paths: list[tuple[str, bool, list[tuple[str, str]]]] = [(start, finalizer, [])]
        seen = {(start, finalizer)}
        while paths:
            at, used, path = paths.pop(0)
            if at == end:
                return path
            for step, by_finalizer in self._steps(at, used):
                if (step[1], by_finalizer) not in seen:
                    seen.add((step[1], by_finalizer))
                    paths.append((step[1], by_finalizer, [*path, step]))
        return []

    def _steps(self, at: str, used: bool) -> Iterator[tuple[tuple[str, str], bool]]:
        yield from ((pair, used) for pair in list(self._edges) if pair[0] == at)
        if not used:
            yield from ((pair, True) for pair in list(self._finalizer_edges) if pair[0] == at)

    def _report(self, key: tuple[str, ...], text: str) -> str:
        """Logs each finding once, and writes it to a file in the directory `where`."""
        if key in self._seen:
            return text
        self._seen.add(key)
        text = f"lock order: pid {os.getpid()}, {threading.current_thread().name}: {text}"
        self.findings.append(text)
        if self._where:
            path = os.path.join(self._where, f"{os.getpid()}.txt")
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                os.write(fd, text.encode() + b"\n")
            finally:
                os.close(fd)
        _log.error("%s", text)
        return text


def _stack() -> Stack:
    """The frames on the stack, without those in this file."""
    frame = sys._getframe(1)
    found: list[tuple[CodeType, int]] = []
    while frame is not None and len(found) < FRAMES_MAX:
        if frame.f_code.co_filename != __file__:
            found.append((frame.f_code, frame.f_lineno))
        frame = cast("Any", frame.f_back)
    return tuple(found)


def _part(title: str, stack: Stack) -> str:
    lines = [f"    {code.co_filename}:{line} in {code.co_qualname}\n" for code, line in stack]
    return f"  {title}\n{''.join(lines)}"


def _words(pair: tuple[str, str], edge: Edge) -> str:
    return _part(f"{pair[0]} was taken at", edge.held) + _part(
        f"then {pair[1]} at ({edge.thread})", edge.taken
    )
