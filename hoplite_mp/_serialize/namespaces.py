"""Globals of functions by value: one namespace for each module of origin.

All functions of a module share its globals: a global that an initializer or a task sets is visible
to the next task. Functions by value keep this rule. A namespace represents one module of one
process, its *origin*, in every process that receives functions of the module. A received function
contains its globals as *entries*. One rule in `Variable.receive` decides about each entry, for all
threads: the entry is written if its mark differs from the mark of its sender's last entry. The mark
is a fingerprint, which changes when the sender binds or changes the variable. So a value that tasks
have set stays until the sender changes the variable. Classes by value follow the same rule. In the
process of the origin, the namespace is the module itself. No entry is written there, because the
module is newer than any entry that comes back.
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
from hoplite_mp._serialize.out_of_band import GlobalArray
from hoplite_mp._serialize.sources import Source, keep_source

ABSENT = b""  # The mark of a name that its sender does not have.
FRESH_BYTES_MAX = 1 << 20  # Larger values get no fingerprint, and are sent on as if changed.
NAMESPACES_MAX = 1024  # With more, most belong to processes that have ended.
SENDERS_MAX = 256  # For one variable; with more, most have ended.
PROCESS_BYTES = 8  # The length of a process's random name.
_MARKER = "__hoplite_mp__"

Key = tuple[str, bytes, int]  # Module name, process, number of the module in that process.
Scope = dict[str, Any]
# A variable as it is sent: name, sender, mark, whether the value holds refs, value. A class has no
# name; its value is the class and its state.
Entry = tuple[str, bytes, bytes, bool, Any]
_nothing: Any = object()


class Variable:
    """A global variable, or a class by value: the received marks, and the entry that was
    written."""

    __slots__ = ("latest", "marks", "name", "scope")

    def __init__(self, scope: Scope | None = None, name: str = "") -> None:
        self.scope = scope  # None: a class
        self.name = name
        self.marks: dict[bytes, bytes] = {}  # sender -> the mark of its last entry
        # Sender and mark of the entry that was written last, and this process's own fingerprint of
        # its value. None: not computed yet.
        self.latest: tuple[bytes, bytes, bytes | None] | None = None

    def receive(self, entry: Entry, always: bool = False) -> None:
        """Writes an entry, unless the sender's last entry was the same."""
        _, sender, mark, holds_refs, value = entry
        if self.marks.get(sender, ABSENT) == mark and not always:
            return
        if type(value) is GlobalArray:
            value = value.value()  # before the lock is taken: this may send a request to the node
        value = _nothing if mark == ABSENT else value
        with _lock:
            before = self.marks.get(sender, ABSENT)
            if before == mark and not always:
                return  # another thread has written it; later, tasks may have set the variable
            if self.scope is not None and _state.depth and (holds_refs or _state.depth > 1):
                old = self.scope.get(self.name, _nothing)
                _state.journal.append((self, sender, value, old, before, self.latest))
            self.put(value)
            self.note(sender, mark)
            self.latest = sender, mark, ABSENT if mark == ABSENT else None
            if _state.depth:  # Only a process that runs tasks computes these fingerprints.
                _state.fresh.append((self, value if self.scope is not None else value[0]))

    def put(self, value: Any) -> None:
        """Sets the variable's value."""
        if self.scope is None:
            fill_class(*value)
        elif value is _nothing:
            self.scope.pop(self.name, None)
        else:
            self.scope[self.name] = value

    def note(self, sender: bytes, mark: bytes) -> None:
        """Records the sender's last mark. If there are too many senders, the oldest one is
        forgotten; its next entry is then written."""
        marks = self.marks
        marks[sender] = mark
        if len(marks) > SENDERS_MAX:
            del marks[next(iter(marks))]
        _state.writes = next(_numbers)

    def sent_as(self, own: bytes) -> tuple[bytes, bytes]:
        """The sender and mark of the value when this process sends it on. An unchanged value keeps
        the sender and mark with which it was received. `own`: this process's fingerprint of the
        value."""
        if self.latest is not None and self.latest[2] == own:
            return self.latest[:2]
        me = process()
        with _lock:
            self.note(me, own)
        return me, own


class Namespace:
    """The globals of one module of one process."""

    __slots__ = ("home", "key", "module", "scope", "variables")

    def __init__(self, key: Key, scope: Scope, home: bool, module: Main | None = None) -> None:
        self.key = key
        self.module = module  # for the `__main__` of another process
        self.scope = scope
        self.home = home
        self.variables: dict[str, Variable] = {}

    def variable(self, name: str) -> Variable:
        """The variable of that name."""
        found = self.variables.get(name)
        if found is None:
            found = self.variables.setdefault(name, Variable(self.scope, name))
        return found


class BroughtGlobals:
    """The globals and classes of one decoded function, and of all functions by value in its stream.
    As a context manager, it collects the entries that are loaded in this thread."""

    __slots__ = ("_outer", "entries", "main", "nbytes", "number")

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.main: Main | None = None  # the module that represents its `__main__`
        self.nbytes = 0  # of the function's stream and its out-of-band arrays
        self.entries: dict[Variable, Entry] = {}

    def __enter__(self) -> BroughtGlobals:
        self._outer: BroughtGlobals | None = _local.brought
        _local.brought = self
        return self

    def __exit__(self, *what: object) -> None:
        _local.brought, self._outer = self._outer, None

    def __bool__(self) -> bool:
        return bool(self.entries or self.main)

    def check(self) -> None:
        """Receives the entries again before the function runs. Its globals then have the sender's
        values, or values that tasks have set later, independent of entries that other functions
        have brought meanwhile."""
        settled = self.number, _state.writes
        if _state.settled == settled:
            return
        if self.main is not None and self.main is not mains.current:
            mains.turn_to(self.main)
        for variable, entry in self.entries.items():
            if variable.marks.get(entry[1]) != entry[2]:
                variable.receive(entry)
        if _state.fresh:
            look_at_fresh()
        # If a value was written meanwhile, the next check compares all entries again.
        _state.settled = settled

    def check_own(self) -> None:
        """Like `check`, for a function that runs inside the task of this process that has sent the
        function. That task may have set globals after sending. The run sees the sent values, and
        the task's own values return at the end of the run. Mutable objects are shared with the
        task, as in a call."""
        self.check()
        for variable, entry in self.entries.items():
            if variable.scope is None:
                continue
            now = variable.scope.get(entry[0], _nothing)
            then = _nothing if entry[2] == ABSENT else entry[4]
            if type(then) is GlobalArray:
                then = then.value()
            if type(now) is not type(then) or (type(then) in ATOMS and now != then):
                variable.receive(entry, always=True)
        if _state.fresh:
            look_at_fresh()


class _State:
    """The state of this process."""

    def __init__(self) -> None:
        # Chosen at import and after a fork, not at the first use. Otherwise two threads that send
        # their first functions at the same time would be two senders with separate namespaces.
        self.process = os.urandom(PROCESS_BYTES)
        self.writes = -1  # changes with each write
        # The number of the BroughtGlobals that was checked last, and `writes` at that time.
        self.settled = -1, -1
        self.depth = 0  # number of nested runs
        self.mains: list[Main | None] = []  # `__main__` at the beginning of each run
        # The entries to undo at the end of a run: variable, sender, the written value, and the
        # previous value, sender's mark and `latest`.
        self.journal: list[tuple[Variable, bytes, Any, Any, bytes, Any]] = []
        self.fresh: list[
            tuple[Variable, Any]
        ] = []  # written values without a fingerprint of this process


class _Local(threading.local):
    brought: BroughtGlobals | None = None  # the function that this thread is loading


class _Marker(NamedTuple):
    """A marker in globals that belong to no module. `place` is the id of the dictionary: a copy of
    the dictionary has another id, and is recognised by this difference."""

    number: int
    place: int


_numbers = itertools.count()
_state = _State()
_local = _Local()
# Held while a module gets its number, a namespace is made, or an entry is compared and written.
# Reentrant, because user code may run under the lock, such as the `__subclasshook__` of a class.
_lock = locks.rlock("serial.namespaces")
_received: dict[Key, Namespace] = {}
_by_place: dict[int, Namespace] = {}  # the namespaces in _received, by the id of their scope
# Modules whose functions were sent, by number.
_modules: weakref.WeakValueDictionary[int, types.ModuleType] = weakref.WeakValueDictionary()
_classes: weakref.WeakKeyDictionary[type, Variable] = weakref.WeakKeyDictionary()


def process() -> bytes:
    """This process's name as a sender and as an origin."""
    return _state.process


def _forked() -> None:
    """Makes a forked child a separate sender, with a new lock: a thread that does not exist in the
    child may hold the old lock."""
    global _lock
    _lock = locks.rlock("serial.namespaces")
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
    with _lock:  # otherwise two threads that send its first functions would assign two numbers
        for ref in _modules.valuerefs():
            module = ref()
            if module is not None and module.__dict__ is scope:
                return ref.key
        found = sys.modules.get(name)
        if isinstance(found, types.ModuleType) and found.__dict__ is scope:
            number = next(_numbers)
            _modules[number] = found
            return number
        marker = scope.get(_MARKER)
        if type(marker) is not _Marker or marker.place != id(scope):
            marker = scope[_MARKER] = _Marker(next(_numbers), id(scope))
        return marker.number


def variable_of_class(cls: type) -> Variable:
    """The variable of a class by value."""
    found = _classes.get(cls)
    return _classes.setdefault(cls, Variable()) if found is None else found


def _namespace(key: Key, attributes: Scope) -> Namespace:
    _, origin, number = key
    if origin == _state.process:
        home = _modules.get(number)
        if home is not None:
            return Namespace(key, home.__dict__, True)
    with _lock:
        found = _received.pop(key, None)
        if found is None:
            module = Main(key[0]) if key[0] in MAIN_NAMES else None
            scope = {} if module is None else module.__dict__
            scope.update(attributes, __builtins__=builtins.__dict__)
            found = Namespace(key, scope, False, module)
            _by_place[id(scope)] = found
        _received[key] = found  # at the end: the least recently used entry is the first
        if len(_received) > NAMESPACES_MAX:
            oldest = _received.pop(next(iter(_received)))
            del _by_place[id(oldest.scope)]
    if found.module is not None:
        _meet(found.module)
    return found


def _meet(module: Main) -> None:
    """Records that an entry of a received `__main__` was loaded."""
    if _local.brought is not None and _local.brought.main is None:
        _local.brought.main = module
    if mains.current is mains.empty and mains.empty is not None:
        mains.turn_to(module)


# -- reading -----------------------------------------------------------------------------------


def load_function(
    code: types.CodeType,
    key: Key,
    attributes: Scope,
    n_cells: int,
    source: Source | None = None,
) -> types.FunctionType:
    """Used in streams: a function by value, whose state is not filled in yet."""
    namespace = _namespace(key, attributes)
    if source is not None and not namespace.home:
        keep_source(source)
    cells = tuple(types.CellType() for _ in range(n_cells)) if n_cells >= 0 else None
    return types.FunctionType(code, namespace.scope, None, None, cells)


def load_function_state(function: types.FunctionType, state: tuple[Any, ...]) -> None:
    """Used in streams: fills in a function that was sent by value."""
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
    if namespace is not None:  # This process is not its origin.
        _take(namespace, manifest)


def load_class_state(cls: type, given: tuple[Any, ...]) -> None:
    """Used in streams: fills in a class that was sent by value."""
    # In the process of its origin, the class exists already. Its members are newer than those in
    # the stream.
    if is_native(cls):
        return
    state, sender, mark, *names = given
    _take_one(variable_of_class(cls), ("", sender, mark, False, (cls, state)))
    if names:
        key, attributes, manifest = names
        namespace = _namespace(key, attributes)
        if not namespace.home:
            _take(namespace, manifest)


def _take(namespace: Namespace, manifest: list[Entry]) -> None:
    for entry in manifest:
        _take_one(namespace.variable(entry[0]), entry)


def _take_one(variable: Variable, entry: Entry) -> None:
    variable.receive(entry)
    if _local.brought is not None:
        _local.brought.entries[variable] = entry


# -- runs --------------------------------------------------------------------------------------


def look_at_fresh() -> None:
    """Computes this process's own fingerprints of the values that have just been written: they are
    complete now, and user code has not changed them yet. By its own fingerprint, a process
    recognises an unchanged value when it sends the value on, and keeps its mark."""
    fresh, _state.fresh = _state.fresh, []
    for variable, value in fresh:
        if variable.latest is None or variable.latest[2] is not None:
            continue
        try:
            own, _ = fingerprint(value, FRESH_BYTES_MAX)
        except Exception:
            continue  # It will be sent on as a value of this process.
        variable.latest = *variable.latest[:2], own


def begin_run() -> int:
    """Begins the run of a task or an initializer. The result is the argument of `end_run`."""
    _state.depth += 1
    _state.mains.append(mains.current)
    return len(_state.journal)


def turn_to_output_owner(output_owner: int) -> None:
    """Switches `__main__` to the module of that driver."""
    mains.output_owner = output_owner
    _install(mains.of_output_owner.get(output_owner, mains.empty))


def _install(module: Main | None) -> None:
    if module is not None and module is not mains.current:
        mains.install(module)
        _state.writes = next(_numbers)


def end_run(mark: int) -> None:
    """Undoes the temporary entries of a run: entries with refs, which are held only during the run,
    and, if the run was nested in another task, all its entries."""
    nested = _state.depth > 1
    _state.depth -= 1
    _state.fresh.clear()
    before_run = _state.mains.pop()
    if nested:
        _install(before_run)
    journal = _state.journal
    if len(journal) == mark:
        return
    with _lock:
        while len(journal) > mark:
            variable, sender, written, old, before, latest = journal.pop()
            assert variable.scope is not None
            if variable.scope.get(variable.name, _nothing) is not written:
                continue  # The run has set the variable itself, so the value stays.
            variable.put(old if nested else _nothing)
            variable.note(sender, before if nested else ABSENT)
            variable.latest = latest if nested else None
