"""Encodes and decodes the function and the arguments of a task, and the refs on which the task
depends."""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._common.signals import is_interruption
from hoplite_mp._serialize.captured_globals import BroughtGlobals, Scan
from hoplite_mp._serialize.errors import blamed, decode_error
from hoplite_mp._serialize.layout import (
    ARGS_ONLY,
    ERROR,
    HEAD,
    PICKLE,
    PLAIN,
    REF_BYTES,
    REFS_AT,
    Encoded,
    PickleStream,
    malformed,
    pack_head,
    read_refs,
    unpack_head,
)
from hoplite_mp._serialize.picklers import LightPickler, MakeScan, heavy_pickler, write_stream
from hoplite_mp._serialize.reading import Reading, load_foreign, load_stream
from hoplite_mp._serialize.reducers import RefMet, Resolve, ref_types
from hoplite_mp._serialize.streams import (
    ATOMS,
    PLAIN_ITEMS_MAX,
    UNPICKLABLE,
    ExitWhilePickling,
    MakeRef,
    NotPicklable,
    ResolveRef,
    all_atoms,
    fill,
    load_within,
    text_of,
    unpicklable,
)
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class EncodedCall(Encoded):
    """The arguments of a call. `dependencies`: the refs for which the task waits. It receives their
    values."""

    __slots__ = ("dependencies",)
    dependencies: list[ObjectRef[Any]]


def encode_call(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    scan: MakeScan | None = None,
    beside: bool = True,
) -> EncodedCall:
    """Encodes the arguments of a task.

    A ref or Future that is an argument, or is inside a list, tuple, dict (as key or value) or set,
    is marked, so that the task receives its value. In other places, and inside `by_ref`, refs stay
    refs. `scan`, `beside`: as in `encode`.
    """
    if not kwargs and len(args) <= PLAIN_ITEMS_MAX:
        simple = _encode_simple_call(args)
        if simple is not None:
            return simple
    value, flags = ((args, kwargs), 0) if kwargs else (args, ARGS_ONLY)
    try:
        written = _write_call(value, args, scan, beside)
        call = fill(EncodedCall, written, PICKLE, flags)
    except (MemoryError, HopliteError):
        raise
    except UNPICKLABLE as error:
        if is_interruption(error):
            raise
        raise _blame_argument(args, kwargs, error) from error
    call.dependencies = list(written.dependencies)
    return call


def _encode_simple_call(args: tuple[Any, ...]) -> EncodedCall | None:
    """Fast path for most calls: arguments that are small immutable values and refs."""
    if all_atoms(map(type, args)):
        stream = pickle.dumps(args, 5)
        head = pack_head(PICKLE, PLAIN | ARGS_ONLY, 0, 0, 0, len(stream)) + stream
        call = EncodedCall(head, [], [], len(head), [])
        call.dependencies = []
        return call
    refs: dict[ObjectRef[Any], int] = {}  # ref -> its index in the payload's list
    types: tuple[Any, ...] = ref_types()
    plain, places = list(args), []
    for place, arg in enumerate(args):
        if isinstance(arg, types):
            ref = arg if isinstance(arg, ObjectRef) else arg.ref
            plain[place] = refs.setdefault(ref, len(refs))
            places.append(place)
        elif type(arg) not in ATOMS:
            return None
    stream = pickle.dumps((plain, places), 5)
    head = pack_head(PICKLE, PLAIN | ARGS_ONLY | REFS_AT, 0, len(refs), 0, len(stream))
    head = b"".join((head, *[ref._id for ref in refs], stream))
    call = EncodedCall(head, [], [], len(head), list(refs))
    call.dependencies = list(refs)
    return call


def _write_call(
    value: Any, args: tuple[Any, ...], scan: MakeScan | None, beside: bool
) -> PickleStream:
    # Fast path: if the call contains no refs, its containers need no search in Python.
    types = ref_types()
    if not any(isinstance(arg, types) for arg in args):
        try:
            return write_stream(value, stop_at_refs=True, scan=scan, beside=beside)
        except RefMet:
            pass
    return write_stream(_mark(value, types, {}, {}), scan=scan, beside=beside)


def _mark(
    value: Any,
    types: tuple[Any, ...],
    marks: dict[ObjectRef[Any], Resolve],
    memo: dict[int, Any],
) -> Any:
    """A copy of the value in which each ref is replaced by a `Resolve`. Only lists, tuples, dicts
    and sets are searched, not their subclasses. Cycles are kept."""
    cls = type(value)
    if cls in ATOMS:
        return value
    if isinstance(value, types):
        ref = value if isinstance(value, ObjectRef) else value.ref
        return marks.setdefault(ref, Resolve(ref))
    if cls not in _WALKED:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if cls is list:
        copy: Any = memo.setdefault(id(value), [])
        copy.extend(_mark(item, types, marks, memo) for item in value)
    elif cls is dict:
        copy = memo.setdefault(id(value), {})
        for key, item in value.items():
            copy[_mark(key, types, marks, memo)] = _mark(item, types, marks, memo)
    else:
        items = [_mark(item, types, marks, memo) for item in value]
        copy = memo.setdefault(id(value), cls(items))  # in a cycle, the copy already exists
    return copy


_WALKED = frozenset({list, tuple, dict, set})


def _blame_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
) -> TypeError:
    labelled = [(f"argument {i}", arg) for i, arg in enumerate(args)]
    labelled += [(f"argument {name}=", arg) for name, arg in kwargs.items()]
    for label, arg in labelled:
        try:
            write_stream(arg)
        except UNPICKLABLE as cause:
            return unpicklable(label, arg, cause, blamed(arg))
    return unpicklable("arguments", args, error)


def read_dependencies(mem: memoryview) -> list[bytes]:
    """The ids of the refs whose values the call needs. The head contains them only if all
    arguments are refs and plain values; for other calls the list is empty. Raises ValueError if
    `mem` is not a payload."""
    if len(mem) < HEAD.size:
        raise malformed(mem)
    return read_refs(mem) if unpack_head(mem)[1] & REFS_AT else []


def decode_call(
    mem: memoryview, make_ref: MakeRef, resolve: ResolveRef, writable: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a call. Arrays by value belong to the task; refs are replaced by the
    results of `resolve`. If the arguments were lost in transit, the payload is an error, and this
    function raises it."""
    if len(mem) < HEAD.size:
        raise malformed(mem)
    head = unpack_head(mem)
    if head[0] == ERROR:
        raise decode_error(mem, make_ref)
    flags, n_refs, meta_len = head[1], head[3], head[5]
    if flags & PLAIN:
        start = HEAD.size + REF_BYTES * n_refs
        if start + meta_len > len(mem):
            raise malformed(mem)
        args = pickle.loads(mem[start : start + meta_len])
        if flags & REFS_AT:
            args, places = args
            values = [resolve(make_ref(id)) for id in read_refs(mem)]
            for place in places:
                args[place] = values[args[place]]
        return tuple(args), {}
    value = load_within(mem, head, 0, make_ref, resolve, writable)
    return (value, {}) if flags & ARGS_ONLY else value


# -- functions of tasks as bytes -------------------------------------------------------------------
#
# The bytes begin with the function's name, which can be read without unpickling. They are not
# payloads, because the sender chooses where they are stored.


def encode_function(function: Callable[..., Any], scan: Scan | None = None) -> bytes:
    """Encodes a function for a task: by reference if readers can import it, otherwise by value.
    The function's large arrays are in the stream; `scan` marks them."""
    return encode_out_of_band(function, scan, False)[0]


def encode_out_of_band(
    function: Callable[..., Any], scan: Scan | None, beside: bool = True
) -> tuple[bytes, list[ObjectRef[Any]], bool]:
    """Encodes a function for a task. Returns the function's bytes, the objects with its large
    arrays, and whether it contains refs. These refs are written as by a foreign pickler, and hold
    no objects in transit. So the caller must keep `function` alive until it has arrived.
    """
    name = _display_name(function).encode(errors="replace")[:255]
    stream = PickleStream()
    try:
        try:
            pickler: Any = LightPickler(stream, 5)
            pickler.out_of_band = _beside(scan, stream, beside)
            pickler.dump(function)
        except (MemoryError, HopliteError):
            raise
        except Exception:
            stream = PickleStream()
            pickler = heavy_pickler()(stream, 5)
            pickler.out_of_band = _beside(scan, stream, beside)
            pickler.scan = Scan() if scan is None else scan
            pickler.dump(function)
    except (MemoryError, HopliteError):
        raise
    except UNPICKLABLE as error:
        if is_interruption(error):
            raise
        text = f"cannot pickle the {type(function).__name__} {_display_name(function)}: "
        if isinstance(error, Exception):
            raise NotPicklable(text + text_of(error) + blamed(function)) from error
        text += f"it raised {type(error).__qualname__}: {text_of(error)}"
        raise ExitWhilePickling(text.removesuffix(": ")) from error
    data = b"".join((bytes((len(name),)), name, *map(_in_band, stream.chunks)))
    return data, stream.refs, pickler.holds_refs


def _beside(scan: Scan | None, stream: PickleStream, beside: bool) -> Scan | None:
    """The scan, prepared to store the arrays of this stream as separate objects; None if the arrays
    stay in the stream."""
    if scan is None or not beside:
        return None
    scan.stream = stream
    return scan


def _in_band(chunk: Any) -> Any:
    """A chunk as plain bytes. Without a `buffer_callback`, the pickler writes a large buffer as
    the PickleBuffer itself, and `join` may not accept the order of its memory."""
    return chunk.raw() if type(chunk) is pickle.PickleBuffer else chunk


def _display_name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return str(name).rpartition("<locals>.")[2]


def function_name(data: bytes | memoryview) -> str:
    """The display name of an encoded function, read without unpickling."""
    return bytes(data[1 : 1 + data[0]]).decode(errors="replace")


def decode_function(data: bytes | memoryview) -> Any:
    """Decodes a function that was encoded by `encode_function`."""
    return load_foreign(data[1 + data[0] :])


def decode_with_carried(
    data: bytes | memoryview, ids: Sequence[bytes] = ()
) -> tuple[Any, BroughtGlobals]:
    """Like `decode_function`; also returns the globals to check before each run of the function.
    `ids`: the ids of its out-of-band objects."""
    # The function's refs are written as by a foreign pickler, so they are made without `Reading`.
    reading = Reading(ids, ObjectRef, None, True)
    with BroughtGlobals() as brought:
        function = load_stream(data[1 + data[0] :], (), reading)
    brought.nbytes = len(data) + reading.nbytes
    return function, brought
