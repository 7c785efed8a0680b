"""Decides which globals are sent with functions by value, and which the receiver writes.

All functions of a module share its globals: a global that an initializer or a task sets is visible
to the next task. Functions that are pickled by value preserve this. A *namespace* represents one
module of one process, its *origin*, in every process that receives functions of the module. A
function brings an *entry* for each global that it uses: name, sender, mark, whether the value holds
refs, value.

**The rule**: an entry is written if its sender has rebound the variable, or has changed the value
in place, since the sender's last entry was written in this process. Otherwise this process keeps
its value, because a task may have set it.

- A *mark* represents the state of a variable at its sender (`fingerprint`). It may differ although
  nothing has changed, but it is never the same after a change.
- The sender's `Scan` reads each variable once, so each mark belongs to the value that is sent. A
  function is pickled again only if a later scan reads something different.
- The receiver's `Variable.receive` compares the mark with that of the sender's last entry, under
  one lock for all threads. `BroughtGlobals.check` repeats this before each run of the function.

Classes by value follow the same rule. In the process of the origin, the namespace is the module
itself, and no entry is written, because the module is newer than any entry that comes back.
"""

from __future__ import annotations

import builtins
import functools
import itertools
import os
import pickle
import sys
import threading
import types
import weakref
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from hoplite_mp._common import locks
from hoplite_mp._serialize.classes import cloudpickled, fill_class
from hoplite_mp._serialize.code import (
    UNBOUND,
    ModuleVariable,
    Reduced,
    captured_values,
    cell_contents,
    importable,
    module_travels,
    parts_of,
)
from hoplite_mp._serialize.mains import MAIN_NAMES, Main, mains
from hoplite_mp._serialize.out_of_band import (
    GlobalArray,
    described,
    load_global_array,
    load_private_copy,
)
from hoplite_mp._serialize.reducers import is_bytes_alone, reducer_override, ref_types
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from hoplite_mp._common.reduction import Array
    from hoplite_mp._serialize.layout import PickleStream
    from hoplite_mp._serialize.out_of_band import ArrayStore, KeptArray
    from hoplite_mp._serialize.sources import Source

ABSENT = b""  # The mark of a variable that does not exist at its sender.
NAMED = b"named"  # The mark of a ModuleVariable.
ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})
DIGEST_BYTES = 16
FRESH_BYTES_MAX = 1 << 20  # Larger values have no fingerprint, and are forwarded as if changed.
NAMESPACES_MAX = 1024  # With more, most belong to processes that have exited.
SENDERS_MAX = 256  # For one variable; with more, most have exited.
PROCESS_BYTES = 8  # The length of a process's random name.
_MARKER = "__hoplite_mp__"  # a variable of globals that belong to no module

Key = tuple[str, bytes, int]  # Module name, process, number of the module in that process.
Scope = dict[str, Any]
# A variable as it is sent: name, sender, mark, whether the value holds refs, value. A class has no
# name; its value is the class and its state.
Entry = tuple[str, bytes, bytes, bool, Any]
# A scan's record of a function: the function, the names of its globals, and the values.
Read = tuple["weakref.ref[types.FunctionType]", tuple[str, ...], list[Any]]
_nothing: Any = object()


# -- variables and namespaces ------------------------------------------------------------------


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
        return self.variables.setdefault(name, Variable(self.scope, name))


class _State:
    """The state of this process."""

    def __init__(self) -> None:
        # Chosen at import and after a fork, not at the first use. Otherwise two threads that send
        # their first functions at the same time would be two senders with separate namespaces.
        self.process = os.urandom(PROCESS_BYTES)
        self.depth = 0  # number of nested runs
        # The entries to undo at the end of a run: variable, sender, the written value, and the
        # previous value, sender's mark and `latest`.
        self.journal: list[tuple[Variable, bytes, Any, Any, bytes, Any]] = []
        # Written values without a fingerprint of this process.
        self.fresh: list[tuple[Variable, Any]] = []


class _Local(threading.local):
    brought: BroughtGlobals | None = None  # the function that this thread is loading


_numbers = itertools.count()
_state = _State()
_local = _Local()
# Held while a module gets its number, a namespace is made, or an entry is compared and written.
# Reentrant, because user code may run under the lock, such as the `__subclasshook__` of a class.
_lock = locks.rlock("serial.globals")
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
    _lock = locks.rlock("serial.globals")
    _state.process = os.urandom(PROCESS_BYTES)


os.register_at_fork(after_in_child=_forked)


def namespace_of(scope: Scope) -> Namespace:
    """The namespace with these globals."""
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
        # These globals belong to no module. A copy of the dictionary is recognised by its id.
        marker: Any = scope.get(_MARKER)
        if type(marker) is not tuple or marker[1:] != (id(scope),):
            marker = scope[_MARKER] = next(_numbers), id(scope)
        return int(marker[0])


def namespace_at(key: Key, attributes: Scope) -> Namespace:
    """The namespace of a function that is being received. `attributes`: its module's attributes."""
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
        if _local.brought is not None and _local.brought.main is None:
            _local.brought.main = found.module
        if mains.current is mains.empty and mains.empty is not None:
            mains.turn_to(found.module)
    return found


def variable_of_class(cls: type) -> Variable:
    """The variable of a class by value."""
    return _classes.setdefault(cls, Variable())


# -- marks -------------------------------------------------------------------------------------

# The numbers that represent functions, and their codes, in fingerprints.
_numbered: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class TooLarge(Exception):
    """Internal: the pickle is longer than the caller allows for a fingerprint."""


class _Sink:
    """The pickler's file, which computes the digest and keeps no bytes."""

    __slots__ = ("hash", "left")

    def __init__(self, nbytes_max: int | None) -> None:
        self.hash = blake2b(digest_size=DIGEST_BYTES)
        self.left = nbytes_max

    def write(self, data: Any) -> None:
        if self.left is not None:
            self.left -= len(data)
            if self.left < 0:
                raise TooLarge
        self.hash.update(data)

    def take(self, buffer: pickle.PickleBuffer) -> None:
        self.write(buffer.raw())


def digest(data: bytes) -> bytes:
    """A 16-byte digest of `data`."""
    return blake2b(data, digest_size=DIGEST_BYTES).digest()


def fingerprint(
    value: Any, nbytes_max: int | None = None, scan: Scan | None = None
) -> tuple[bytes, bool]:
    """The fingerprint of a value, never empty, and whether the value holds refs.

    It is a digest of a pickle. In this pickle, a function by value is replaced by a number that
    identifies it and by its captured values except globals, which are separate variables. An array
    that `scan` stores as an object is replaced by the object's mark, so the bytes of an unchanged
    array are not read. Only fingerprints of the same process can be compared.

    Raises the errors of pickling, or TooLarge for pickles of more than `nbytes_max` bytes.
    """
    if type(value) in ATOMS:
        return digest(pickle.dumps(value, 5)), False
    scan = Scan() if scan is None else scan
    if type(value) is types.FunctionType and not (any(scan.carried(value)) or importable(value)):
        return b"function %d %d" % scan.numbers(value), False
    sink = _Sink(nbytes_max)
    pickler: Any = _fingerprinter()(sink, 5, buffer_callback=sink.take)
    pickler.scan = scan
    pickler.dump(value)
    return sink.hash.digest(), pickler.holds_refs


@functools.cache
def _fingerprinter() -> type[pickle.Pickler]:
    import cloudpickle

    class Fingerprinter(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
        by_value = True
        stream: PickleStream | None = None
        stop_at_refs = False
        holds_refs = False
        scan: Scan
        out_of_band = None

        def reducer_override(self, obj: Any) -> Reduced:
            if isinstance(obj, ref_types()):
                self.holds_refs = True
            elif isinstance(obj, np.ndarray) and self.scan.keeps(obj):
                return _stand_in, (self.scan.copy_of(obj)[0].mark, *described(obj))
            return reducer_override(self, obj)

        def reduce_by_value(self, obj: Any) -> Reduced:
            if isinstance(obj, types.FunctionType):
                return _stand_in, self.scan.numbers(obj), self.scan.carried(obj)
            return cloudpickled(self, obj)

    return Fingerprinter


def _stand_in(*what: Any) -> None:
    """A placeholder for a function or an array, in pickles that are never loaded."""


# -- the sender --------------------------------------------------------------------------------


class Scan:
    """Reads all captured values of a function or another value. Each variable, cell, class and
    array is read once, however many functions use it, so the sent value is the compared value."""

    def __init__(self, store: ArrayStore | None = None) -> None:
        self.store = store  # None: arrays stay in the stream
        # Names the objects of arrays. None: arrays stay in the stream, and the objects only mark
        # them. Without marks, an array would count as changed between an initializer and a task.
        self.stream: PickleStream | None = None
        # (id of a dictionary of globals, name) -> the dictionary and its value, or UNBOUND; (id of
        # a cell or function, "") -> the cell or function, and its contents or parts. These values
        # are sent, even if other threads change them later.
        self.values: dict[tuple[int, str], tuple[Any, Any]] = {}
        # A record of each function that is sent by value; None: no record is needed, or a
        # comparison with it could miss a change.
        self.reads: list[Read] | None = None
        # By id. The arrays are held: a reducer may make a new array at each call, which could
        # otherwise get the id of an earlier array.
        self._arrays: dict[int, tuple[Array, tuple[KeptArray, Any]]] = {}
        self._met: list[Any] = []  # states of the current variable's arrays
        self._globals: dict[int, GlobalArray] = {}  # by id: pickle's memo needs the same object
        self._namespaces: dict[int, Namespace] = {}
        self._entries: dict[tuple[int, str], Entry] = {}
        self._classes: dict[type, tuple[bytes, bool]] = {}
        self.sources: dict[tuple[str, int], Source] = {}  # by file and line

    # -- arrays

    def keeps(self, array: Array) -> bool:
        """Whether the array is stored as a separate object."""
        return self.takes(array) and is_bytes_alone(array)

    def takes(self, array: Array) -> bool:
        """Whether the array is large enough to be stored separately."""
        return self.store is not None and array.nbytes >= self.store.nbytes_min

    def copy_of(self, array: Array) -> tuple[KeptArray, Any]:
        """Like `ArrayStore.copy_of`, computed once for each array."""
        found = self._arrays.get(id(array))
        if found is None:
            assert self.store is not None
            found = self._arrays[id(array)] = (array, self.store.copy_of(array))
        self._met.append(found[1][1])
        return found[1]

    def states(self) -> list[Any]:
        """The states of all arrays so far. While they are held, unchanged arrays keep their
        marks."""
        return [known for _, (_, known) in self._arrays.values()]

    def hold(self, fn: Any) -> None:
        """Holds the states of all arrays so far, as long as this function lives."""
        if self.store is not None:
            self.store.hold(fn, self.states())

    def reduce(self, array: Array) -> Reduced:
        """Reduces an array to an out-of-band object."""
        return load_private_copy, (self._place(array), *described(array))

    def reduce_global(self, array: Array) -> Reduced:
        """Reduces an array that is the value of a global variable."""
        return load_global_array, (self._place(array), array.nbytes, *described(array))

    def _place(self, array: Array) -> int:
        assert self.stream is not None
        return self.stream.index_of(self.copy_of(array)[0].ref)

    # -- functions, classes and variables

    def namespace(self, scope: Scope) -> Namespace:
        """Like `namespace_of`, computed once for each module."""
        found = self._namespaces.get(id(scope))
        if found is None:
            found = self._namespaces[id(scope)] = namespace_of(scope)
        return found

    def variable(self, scope: Scope, name: str) -> Any:
        """The value of a global variable, or UNBOUND."""
        place = id(scope), name
        if place not in self.values:
            self.values[place] = scope, scope.get(name, UNBOUND)
        return self.values[place][1]

    def cell(self, cell: types.CellType) -> tuple[Any, ...]:
        """Like `cell_contents`."""
        place = id(cell), ""
        if place not in self.values:
            self.values[place] = cell, cell_contents(cell)
        return self.values[place][1]  # type: ignore[no-any-return]

    def parts(self, function: types.FunctionType) -> tuple[Any, ...]:
        """The code, defaults, keyword defaults and attributes of a function."""
        place = id(function), ""
        if place not in self.values:
            *parts, named, attributes = parts_of(function)
            self.values[place] = function, (*parts, named and dict(named), dict(attributes))
        return self.values[place][1]  # type: ignore[no-any-return]

    def numbers(self, function: types.FunctionType) -> tuple[int, int]:
        """Two numbers that represent a function with its current code, the same in all threads."""
        code = self.parts(function)[0]
        return (
            _numbered.setdefault(function, next(_numbers)),
            _numbered.setdefault(code, next(_numbers)),
        )

    def carried(self, function: types.FunctionType) -> tuple[Any, ...]:
        """The captured values of a function except globals."""
        return (*self.parts(function)[1:], tuple(map(self.cell, function.__closure__ or ())))

    def record(self, function: types.FunctionType, names: tuple[str, ...]) -> None:
        """Records the parts, closure and globals of a function, if none of these is mutable."""
        if self.reads is None:
            return
        scope, closure = function.__globals__, function.__closure__ or ()
        found = [self.variable(scope, name) for name in names]
        values = captured_values(self.parts(function), map(self.cell, closure), found)
        held = list(map(self._held, values))
        if all(map(_is_constant, held)):
            self.reads.append((weakref.ref(function), names, held))
        else:
            self.reads = None

    def unchanged(self, reads: list[Read]) -> bool:
        """Whether everything is still as another scan recorded it."""
        for ref, names, before in reads:
            function = ref()
            if function is None:
                return False
            scope, closure = function.__globals__, function.__closure__ or ()
            found = [scope.get(name, UNBOUND) for name in names]
            now = captured_values(parts_of(function), map(cell_contents, closure), found)
            if len(now) != len(before):
                return False
            for value, then in zip(now, before, strict=True):
                if value is not then and self._held(value) is not then:
                    return False
        return True

    def _held(self, value: Any) -> Any:
        """The record of a value, which is the same object as long as the value is unchanged: the
        value itself; for a function, a weak reference; for a stored array, its mark."""
        if type(value) is types.FunctionType:
            return weakref.ref(value)
        if isinstance(value, np.ndarray) and self.keeps(value):
            return self.copy_of(value)[0].mark
        return value

    def mark_of(self, value: Any) -> tuple[bytes, bool]:
        """Like `fingerprint`, computed once for a class, whose state and name in `__main__` need
        it."""
        if not isinstance(value, type):
            return fingerprint(value, scan=self)
        if value not in self._classes:
            self._classes[value] = fingerprint(value, scan=self)
        return self._classes[value]

    def entry(self, namespace: Namespace, name: str, needed: bool = True) -> Entry | None:
        """The entry of a global variable; None if it is not sent. `needed` is False if code only
        mentions the variable, which then must not make a function unpicklable."""
        place = id(namespace.scope), name
        found = self._entries.get(place) or self._entry(namespace, name, needed)
        if found is not None:
            self._entries[place] = found
        return found

    def _entry(self, namespace: Namespace, name: str, needed: bool) -> Entry | None:
        scope, store = namespace.scope, self.store
        value = self.variable(scope, name)
        self._met = []
        is_module = isinstance(value, types.ModuleType)
        if is_module and not needed and not module_travels(value.__name__):
            return None
        module: Any = sys.modules.get(namespace.key[0])
        if not isinstance(module, types.ModuleType) or vars(module) is not scope:
            module = None
        try:
            own, holds_refs = (ABSENT, False) if value is UNBOUND else self.mark_of(value)
        except Exception as error:
            if not needed:
                return None
            if isinstance(error, (MemoryError, HopliteError)):  # such as a full store
                raise
            if not namespace.home:
                # A task has set this global to a value that cannot be sent, such as an open
                # connection. Readers use their own value, or have none, as in the standard library.
                return None
            if module is not None and module_travels(namespace.key[0]):
                # A decorator of another module, such as `np.errstate`, gives its wrapper the module
                # of the wrapped function. Readers take the variable of their own module.
                return name, process(), NAMED, False, ModuleVariable(module, name)
            # It counts as changed, so the pickler will raise the reason.
            own, holds_refs = os.urandom(8), False
        if store is not None and module is not None:
            store.bound(module, name, value, list(self._met))
        if isinstance(value, np.ndarray) and self.stream is not None and self.keeps(value):
            if store is not None and namespace.home:
                store.warn(namespace.key[0], name, value)
            value = self._globals.setdefault(id(value), GlobalArray(value))
        value = None if value is UNBOUND else value
        if namespace.home:
            return name, process(), own, holds_refs, value
        return (name, *namespace.variable(name).sent_as(own), holds_refs, value)


_IMMUTABLE = ATOMS | {types.BuiltinFunctionType, types.CodeType, weakref.ref}


def _is_constant(value: Any) -> bool:
    """Whether a value is sent in the same way as long as it is the same object."""
    kind = type(value)
    if kind is types.ModuleType:
        return module_travels(value.__name__)
    return value is UNBOUND or kind in _IMMUTABLE or (isinstance(value, type) and importable(value))


# -- the receiver ------------------------------------------------------------------------------


def take_entries(namespace: Namespace, manifest: list[Entry]) -> None:
    """Receives the entries of a function or class."""
    for entry in manifest:
        take(namespace.variable(entry[0]), entry)


def take(variable: Variable, entry: Entry) -> None:
    """Receives an entry, and notes it for later runs of the function that is being loaded."""
    variable.receive(entry)
    if _local.brought is not None:
        _local.brought.entries[variable] = entry


class BroughtGlobals:
    """The globals and classes of one decoded function, and of all functions by value in its stream.
    As a context manager, it collects the entries that are loaded in this thread."""

    __slots__ = ("_outer", "entries", "main", "nbytes")

    def __init__(self) -> None:
        self.main: Main | None = None  # the module that represents its `__main__`
        self.nbytes = 0  # size of the function's stream and out-of-band arrays
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
        if self.main is not None and self.main is not mains.current:
            mains.turn_to(self.main)
        for variable, entry in self.entries.items():
            if variable.marks.get(entry[1]) != entry[2]:
                variable.receive(entry)
        if _state.fresh:
            look_at_fresh()

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


# A run of a task or an initializer: the length of the journal, and `__main__`, at its beginning.
Run = tuple[int, "Main | None"]


def begin_run() -> Run:
    """Begins a run."""
    _state.depth += 1
    return len(_state.journal), mains.current


def end_run(run: Run) -> None:
    """Undoes the temporary entries of a run: entries with refs, which are held only during the run,
    and, if the run was nested in another task, all its entries."""
    nested = _state.depth > 1
    _state.depth -= 1
    _state.fresh.clear()
    if nested:
        mains.install(run[1])
    journal = _state.journal
    if len(journal) == run[0]:
        return
    with _lock:
        while len(journal) > run[0]:
            variable, sender, written, old, before, latest = journal.pop()
            assert variable.scope is not None
            if variable.scope.get(variable.name, _nothing) is not written:
                continue  # The run has set the variable itself, so the value stays.
            variable.put(old if nested else _nothing)
            variable.note(sender, before if nested else ABSENT)
            variable.latest = latest if nested else None
