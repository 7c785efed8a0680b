"""Namespaces: the globals of functions that came by value, one dictionary for each origin.

In the standard library all functions of a module share its globals, so what an initializer or a
task sets there is seen by the next task. Functions by value do so here too: a namespace stands for
one module of one process, its *origin*, in every process that its functions come to. A function
brings the values of its globals as a manifest of *entries*. An entry is written only if its
fingerprint differs from that of its sender's last entry of that name. So what tasks have set stays
until the sender changes it. At home, in the process of the origin, the namespace is the module
itself; nothing is written there, because it is newer than any entry that comes back.
"""

from __future__ import annotations

import builtins
import itertools
import os
import sys
import threading
import types
import weakref
from typing import Any, NamedTuple

from hoplite_mp._common import locks
from hoplite_mp._serialize.classes import fill_class
from hoplite_mp._serialize.code import is_native
from hoplite_mp._serialize.fingerprints import ATOMS, fingerprint
from hoplite_mp._serialize.mains import MAIN_NAMES, Main, mains
from hoplite_mp._serialize.out_of_band import Shared
from hoplite_mp._serialize.sources import Source, keep_source

ABSENT = b""  # The fingerprint of a name that its sender does not have.
FRESH_BYTES_MAX = 1 << 20  # Larger values get no fingerprint; they are sent on as if changed.
NAMESPACES_MAX = 1024  # If there are more, most belong to processes that have ended.
SENDERS_MAX = 256  # For one name; if there are more, most have ended.
PROCESS_BYTES = 8  # The length of a process's random name.
_MARKER = "__hoplite_mp__"

Key = tuple[str, bytes, int]  # Module name, process, number of the module in that process.
Scope = dict[str, Any]
_nothing: Any = object()


# A global variable on its way: name, sender, fingerprint, whether the value holds refs, value.
Entry = tuple[str, bytes, bytes, bool, Any]


class Seen:
    """What is known of a global variable, or of a class by value."""

    __slots__ = ("latest", "marks")

    def __init__(self) -> None:
        self.marks: dict[bytes, bytes] = {}  # sender -> the fingerprint that it sent last
        # Sender and fingerprint of the entry that was written last, and this process's own
        # fingerprint of its value; None: not taken yet.
        self.latest: tuple[bytes, bytes, bytes | None] | None = None

    def sent_as(self, own: bytes) -> tuple[bytes, bytes]:
        """The sender and fingerprint to send a value on with; `own`: this process's fingerprint of
        it. If it is unchanged, they are those with which it came."""
        if self.latest is not None and self.latest[2] == own:
            return self.latest[:2]
        me = process()
        self.mark(me, own)
        _state.changes = next(_numbers)
        return me, own

    def mark(self, sender: bytes, mark: bytes) -> None:
        """Notes the sender's last fingerprint. If there are too many senders, the oldest one is
        forgotten, and the next value that it sends is written."""
        marks = self.marks
        marks[sender] = mark
        if len(marks) > SENDERS_MAX:
            del marks[next(iter(marks))]


class Namespace:
    """The globals of one module of one process."""

    __slots__ = ("home", "key", "module", "scope", "seen")

    def __init__(self, key: Key, scope: Scope, home: bool, module: Main | None = None) -> None:
        self.key = key
        self.module = module  # of a `__main__` that is not this process's own
        self.scope = scope
        self.home = home
        self.seen: dict[str, Seen] = {}

    def seen_of(self, name: str) -> Seen:
        seen = self.seen.get(name)
        if seen is None:
            seen = self.seen.setdefault(name, Seen())
        return seen

    def write(self, entry: Entry, always: bool = False) -> None:
        """Writes an entry, unless the sender's last entry was the same."""
        name, sender, mark, holds_refs, value = entry
        seen = self.seen_of(name)
        before = seen.marks.get(sender, ABSENT)
        if mark == before and not always:
            return
        if type(value) is Shared:
            value = value.value()  # before the lock is taken, because it may ask the node
        scope = self.scope
        with _writing:
            before = seen.marks.get(sender, ABSENT)
            if mark == before and not always:
                return  # another thread has written it, and tasks may have set the variable since
            if _state.depth and (holds_refs or _state.depth > 1):
                old = scope.get(name, _nothing)
                _state.journal.append((self, entry, old, before, seen.latest))
            seen.mark(sender, mark)
            if mark == ABSENT:
                scope.pop(name, None)
                seen.latest = sender, mark, ABSENT
            else:
                scope[name] = value
                seen.latest = sender, mark, None
                _to_look_at(seen, value)
            _state.changes = next(_numbers)


class BroughtGlobals:
    """The globals that one decoded function has brought: the manifests of all functions by value
    in its stream, and the classes."""

    __slots__ = ("classes", "entries", "main", "nbytes", "number")

    def __init__(self) -> None:
        self.main: Main | None = None  # what stands for its `__main__`
        self.number = next(_numbers)
        self.nbytes = 0  # of the function's stream, and of arrays that have come beside it
        # Each global once, with the marks to compare with (a part of its namespace).
        self.entries: dict[
            tuple[int, str], tuple[dict[bytes, bytes], bytes, bytes, Namespace, Entry]
        ] = {}
        self.classes: list[tuple[type, bytes, bytes, Any]] = []

    def __bool__(self) -> bool:
        return bool(self.entries or self.classes or self.main)

    def check(self) -> None:
        """Called before the function runs. Its globals are then as its sender sent them, or as
        tasks have set them since, whatever other functions have brought meanwhile."""
        changes = _state.changes
        if _state.checked == self.number and _state.checked_at == changes:
            return
        if self.main is not None and self.main is not mains.current:
            mains.turn_to(self.main)
        for cls, sender, mark, state in self.classes:
            _set_class(cls, sender, mark, state)
        for marks, sender, mark, namespace, entry in self.entries.values():
            if marks.get(sender, ABSENT) != mark:
                namespace.write(entry)
        if _state.fresh:
            look_at_fresh()
        # If this check or another thread has written a value meanwhile, the next check compares
        # all entries again.
        _state.checked, _state.checked_at = self.number, changes

    def check_own(self) -> None:
        """Called before a function runs inside the task of this process that has sent it. That
        task may have set globals since; the run sees what was sent, and the task has its own
        values again when the run ends. Mutable objects are shared with it, as in a call."""
        self.check()
        for *_, namespace, entry in self.entries.values():
            now = namespace.scope.get(entry[0], _nothing)
            then = _nothing if entry[2] == ABSENT else entry[4]
            if type(then) is Shared:
                then = then.value()
            if type(now) is not type(then) or (type(then) in ATOMS and now != then):
                namespace.write(entry, always=True)
        if _state.fresh:
            look_at_fresh()


class _State:
    """The state of this process."""

    def __init__(self) -> None:
        # Chosen at import and after a fork, not when it is first needed: two threads that sent
        # their first functions at the same time would be two senders with namespaces of their own.
        self.process = os.urandom(PROCESS_BYTES)
        # Another number after each write of an entry or a class.
        self.changes = -1
        self.checked = (
            self.checked_at
        ) = -1  # the BroughtGlobals checked last, and `changes` at that time
        self.depth = 0  # how many runs are inside each other
        self.mains: list[Main | None] = []  # what was `__main__` when each of them began
        # The entries that the end of a run takes back: namespace, entry, and the value, mark and
        # latest before it was written.
        self.journal: list[tuple[Namespace, Entry, Any, bytes, Any]] = []
        self.fresh: list[tuple[Seen, Any]] = []  # written values without an own fingerprint yet


class _Local(threading.local):
    carried: BroughtGlobals | None = None


class _Marker(NamedTuple):
    """Stands in globals that belong to no module. `place` is the id of the dictionary, by which a
    copy of it is recognized as another."""

    number: int
    place: int


_numbers = itertools.count()
_state = _State()
_local = _Local()
_lock = locks.lock("serial.namespaces")
# Two threads that send functions of one module for the first time must find the same number.
_numbering = locks.rlock("serial.numbers")
# Held while an entry or a class is compared with the sender's last one and written. Reentrant,
# because user code may run meanwhile, such as a metaclass's `__setattr__`.
_writing = locks.rlock("serial.writing")
_received: dict[Key, Namespace] = {}
_by_place: dict[int, Namespace] = {}  # those of _received, by the id of their scope
_modules: dict[int, weakref.ref[types.ModuleType]] = {}  # modules whose functions were sent
_classes: weakref.WeakKeyDictionary[type, Seen] = weakref.WeakKeyDictionary()


def process() -> bytes:
    """This process's name as a sender and as an origin."""
    return _state.process


def _forked() -> None:
    """Makes a forked child a sender of its own. A thread that the child does not have may have held
    the locks."""
    global _lock, _numbering, _writing
    _lock = locks.lock("serial.namespaces")
    _numbering, _writing = locks.rlock("serial.numbers"), locks.rlock("serial.writing")
    _state.process = os.urandom(PROCESS_BYTES)


os.register_at_fork(after_in_child=_forked)


# -- where a function belongs ------------------------------------------------------------------


def namespace_of(scope: Scope) -> Namespace:
    """The namespace whose globals these are."""
    found = _by_place.get(id(scope))
    if found is not None:
        return found
    name = scope.get("__name__")
    name = name if type(name) is str else ""
    return Namespace((name, process(), _number_of(name, scope)), scope, True)


def _number_of(name: str, scope: Scope) -> int:
    with _numbering:
        return _number_now(name, scope)


def _number_now(name: str, scope: Scope) -> int:
    for number, ref in list(_modules.items()):
        module = ref()
        if module is None:
            del _modules[number]
        elif module.__dict__ is scope:
            return number
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType) and module.__dict__ is scope:
        number = next(_numbers)
        _modules[number] = weakref.ref(module)
        return number
    marker = scope.get(_MARKER)
    if type(marker) is not _Marker or marker.place != id(scope):
        marker = scope[_MARKER] = _Marker(next(_numbers), id(scope))
    return marker.number


def _namespace(key: Key, attributes: Scope) -> Namespace:
    _, origin, number = key
    if origin == _state.process:
        ref = _modules.get(number)
        module = None if ref is None else ref()
        if module is not None:
            return Namespace(key, module.__dict__, True)
    with _lock:
        found = _received.pop(key, None)
        if found is None:
            module = Main(key[0]) if key[0] in MAIN_NAMES else None
            scope = {} if module is None else module.__dict__
            scope.update(attributes, __builtins__=builtins.__dict__)
            found = Namespace(key, scope, False, module)
            _by_place[id(scope)] = found
        _received[key] = found  # at the end, so that the least recently used stands in front
        if len(_received) > NAMESPACES_MAX:
            oldest = _received.pop(next(iter(_received)))
            del _by_place[id(oldest.scope)]
    if found.module is not None:
        _meet(found.module)
    return found


def _meet(module: Main) -> None:
    """Something from that `__main__` has arrived."""
    if _local.carried is not None and _local.carried.main is None:
        _local.carried.main = module
    if mains.current is mains.empty and mains.empty is not None:
        mains.turn_to(module)


# -- reading -----------------------------------------------------------------------------------


class collecting:
    """`with collecting() as carried:` collects the globals of the functions that are loaded inside
    it."""

    def __enter__(self) -> BroughtGlobals:
        self._outer = _local.carried
        _local.carried = carried = BroughtGlobals()
        return carried

    def __exit__(self, *what: object) -> None:
        _local.carried = self._outer


def load_function(
    code: types.CodeType,
    key: Key,
    attributes: Scope,
    n_cells: int,
    source: Source | None = None,
) -> types.FunctionType:
    """Named in streams: a function by value, whose state is not filled in yet."""
    namespace = _namespace(key, attributes)
    if source is not None and not namespace.home:
        keep_source(source)
    cells = tuple(types.CellType() for _ in range(n_cells)) if n_cells >= 0 else None
    return types.FunctionType(code, namespace.scope, None, None, cells)


def load_function_state(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Named in streams: fills in a function that came by value."""
    attributes, slots, manifest = state[0], state[1], state[-1]
    function.__dict__.update(attributes)
    for own, cell in zip(function.__closure__ or (), slots.pop("__closure__") or (), strict=True):
        try:
            own.cell_contents = cell.cell_contents
        except ValueError:  # The cell is empty.
            continue
    for name, value in slots.items():
        setattr(function, name, value)
    namespace = _by_place.get(id(function.__globals__))
    if namespace is None:
        return  # It has come home.
    _write_all(namespace, manifest)


def _write_all(namespace: Namespace, manifest: list[Entry]) -> None:
    carried = _local.carried
    for entry in manifest:
        namespace.write(entry)
        if carried is not None:
            name, sender, mark, _, _ = entry
            marks = namespace.seen_of(name).marks
            carried.entries[id(namespace), name] = marks, sender, mark, namespace, entry


def load_class_state(cls: type, given: tuple[Any, ...]) -> None:
    """Named in streams: fills in a class that came by value."""
    # A class that comes home is the class that is here already. Its members are newer than those in
    # the stream.
    if is_native(cls):
        return
    state, sender, mark, *names = given
    _set_class(cls, sender, mark, state)
    if _local.carried is not None:
        _local.carried.classes.append((cls, sender, mark, state))
    if names:
        key, attributes, manifest = names
        namespace = _namespace(key, attributes)
        if not namespace.home:
            _write_all(namespace, manifest)


def _set_class(cls: type, sender: bytes, mark: bytes, state: Any) -> None:
    seen = seen_of_class(cls)
    if seen.marks.get(sender) == mark:
        return
    with _writing:
        if seen.marks.get(sender) == mark:
            return
        fill_class(cls, state)
        seen.mark(sender, mark)
        seen.latest = sender, mark, None
        _to_look_at(seen, cls)
        _state.changes = next(_numbers)


def seen_of_class(cls: type) -> Seen:
    """What is known of a class by value."""
    seen = _classes.get(cls)
    if seen is None:
        seen = _classes.setdefault(cls, Seen())
    return seen


# -- runs --------------------------------------------------------------------------------------


def _to_look_at(seen: Seen, value: Any) -> None:
    if _state.depth:  # Only a process that runs tasks takes these fingerprints.
        _state.fresh.append((seen, value))


def look_at_fresh() -> None:
    """Takes this process's own fingerprints of the values that have just been written, which are
    complete by now, before user code can change them. With its own fingerprint a process sees
    whether a value is unchanged when it sends it on, and sends it with the mark it came with."""
    fresh, _state.fresh = _state.fresh, []
    for seen, value in fresh:
        if seen.latest is None or seen.latest[2] is not None:
            continue
        try:
            own, _ = fingerprint(value, FRESH_BYTES_MAX)
        except Exception:
            continue  # It will be sent on as a value of this process's own.
        seen.latest = *seen.latest[:2], own


def begin_run() -> int:
    """Called when a task or an initializer begins. Give the result to `end_run`."""
    _state.depth += 1
    _state.mains.append(mains.current)
    return len(_state.journal)


def turn_to_output_owner(output_owner: int) -> None:
    """Switches `__main__` to the module of that driver."""
    mains.output_owner = output_owner
    module = mains.of_output_owner.get(output_owner, mains.empty)
    if module is not None and module is not mains.current:
        mains.install(module)
        _state.changes = next(_numbers)


def end_run(mark: int) -> None:
    """Takes back the entries that are not to stay: those with refs, which are held no longer than
    the run; and, if this run was inside another task's, all entries that it has brought."""
    nested = _state.depth > 1
    _state.depth -= 1
    _state.fresh.clear()
    before_run = _state.mains.pop()
    if nested and before_run is not None and before_run is not mains.current:
        mains.install(before_run)
        _state.changes = next(_numbers)
    journal = _state.journal
    if len(journal) == mark:
        return
    while len(journal) > mark:
        namespace, entry, old, before, latest = journal.pop()
        name, sender, _, _, value = entry
        scope, seen = namespace.scope, namespace.seen_of(name)
        if type(value) is Shared:
            value = value.array
        if scope.get(name, _nothing) is not (_nothing if entry[2] == ABSENT else value):
            continue  # The run has set the variable itself, so it stays.
        if not nested or old is _nothing:
            scope.pop(name, None)
        else:
            scope[name] = old
        seen.marks[sender] = before if nested else ABSENT
        seen.latest = latest if nested else None
    _state.changes = next(_numbers)
