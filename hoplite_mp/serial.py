"""Payloads: the bytes of an object, and how values become payloads and come back without a copy.

The layout is drawn in docs/architecture.md ("Payload of an object"). This module makes and reads
heads; it never copies large data. Writing hands out the head and the buffers, which compiled code
copies into the store; reading makes arrays that are views of the store's memory.

What most objects are needs no pickle at all: one array, bytes, or a number is described by a few
bytes that the node can read too, so that a reduction never unpickles what a user wrote.
"""

from __future__ import annotations

import functools
import pickle
import struct
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hoplite_mp.errors import TaskError
from hoplite_mp.ref import ObjectRef
from hoplite_mp.serial_code import (
    BareException,
    Reading,
    RefMet,
    Resolve,
    Stream,
    decode_function,
    dtype_name,
    encode_function,
    function_name,
    load_stream,
    named_dtype,
    raw_bytes,
    ref_types,
    register_future_type,
    register_pickle_by_value,
    write_stream,
)

__all__ = [
    "ARRAY",
    "BYTES",
    "ERROR",
    "NUMBER",
    "PICKLE",
    "ArrayInfo",
    "Encoded",
    "EncodedCall",
    "RemoteTraceback",
    "decode",
    "decode_call",
    "decode_error",
    "decode_function",
    "describe_array",
    "encode",
    "encode_array_head",
    "encode_call",
    "encode_error",
    "encode_function",
    "function_name",
    "large_copies",
    "payload_kind",
    "read_contributors",
    "read_refs",
    "register_future_type",
    "register_pickle_by_value",
]

Array = np.ndarray[Any, np.dtype[Any]]
MakeRef = Callable[[bytes], ObjectRef[Any]]
ResolveRef = Callable[[ObjectRef[Any]], Any]

PICKLE, ARRAY, BYTES, NUMBER, ERROR = range(5)

HEAD = struct.Struct("<BBHIII")  # kind, flags, reserved, n_refs, n_buffers, meta_len
BUFFER = struct.Struct("<QQ")  # offset, length
ARRAY_META = struct.Struct("<BBHI")  # ndim, order, length of the dtype's name, n_contributors
ERROR_META = struct.Struct("<II")  # lengths of the traceback and of the summary
BUFFER_ALIGN = 64
REF_BYTES = 16
NUMBER_ALIGN = 16
META_BYTES_MAX = 2**32 - 1  # The field in the head is a u32.

# Flags of PICKLE: a stream without any function of ours in it; the arguments of a call without
# keywords; such arguments and the places among them where an index of a ref stands for its value.
PLAIN, ARGS_ONLY, REFS_AT = 1, 2, 4
MUTABLE = 1  # Of BYTES: was a bytearray.
HAS_CONTRIBUTORS = 1  # Of ARRAY.
# Of NUMBER: which Python type it was; 0 is the numpy scalar that the description names.
NUMPY_SCALAR, PY_INT, PY_FLOAT, PY_COMPLEX, PY_BOOL, PY_NONE = range(6)

_ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})
PLAIN_ITEMS_MAX = 64  # Longer containers are left to the pickler: looking at each item costs more.


class Encoded:
    """A payload ready to be copied: `head` at 0, each of `buffers` at its place in `offsets`.

    `refs` are the refs inside, in the payload's order; the caller keeps them alive. The buffers
    are one-dimensional memoryviews of the value's own memory.
    """

    __slots__ = ("buffers", "head", "nbytes", "offsets", "refs")

    def __init__(
        self,
        head: bytes,
        buffers: list[memoryview],
        offsets: list[int],
        nbytes: int,
        refs: list[ObjectRef[Any]],
    ) -> None:
        self.head = head
        self.buffers = buffers
        self.offsets = offsets
        self.nbytes = nbytes
        self.refs = refs

    def tobytes(self) -> bytes:
        """The whole payload, copied: for small ones, and for tests."""
        payload = bytearray(self.nbytes)
        payload[: len(self.head)] = self.head
        for offset, buffer in zip(self.offsets, self.buffers, strict=True):
            payload[offset : offset + buffer.nbytes] = buffer
        return bytes(payload)

    @property
    def kind(self) -> int:
        """PICKLE, ARRAY, BYTES, NUMBER or ERROR."""
        return self.head[0]


class EncodedCall(Encoded):
    """The arguments of a call; the task waits for `dependencies`, whose values it receives."""

    __slots__ = ("dependencies",)
    dependencies: list[ObjectRef[Any]]


class ArrayInfo(NamedTuple):
    """An array or number inside a payload: its bytes stand at `offset`."""

    dtype_name: str
    shape: tuple[int, ...]
    order: str
    offset: int
    nbytes: int


def payload_kind(mem: memoryview) -> int:
    """PICKLE, ARRAY, BYTES, NUMBER or ERROR."""
    return mem[0]


def read_refs(mem: memoryview) -> list[bytes]:
    """The ids of the refs inside a payload."""
    end = HEAD.size + REF_BYTES * HEAD.unpack_from(mem)[3]
    return [bytes(mem[i : i + REF_BYTES]) for i in range(HEAD.size, end, REF_BYTES)]


def _align(offset: int, to: int = BUFFER_ALIGN) -> int:
    return (offset + to - 1) // to * to


# --- writing values ------------------------------------------------------------------------------


def encode(value: Any) -> Encoded:
    """The payload of any value. Raises TypeError for what cannot be pickled."""
    encoder = _ENCODERS.get(type(value), _encode_other)
    encoded = encoder(value)
    return _encode_other(value) if encoded is None else encoded


def _encode_plain(value: Any, flags: int = PLAIN) -> Encoded:
    stream = pickle.dumps(value, 5)
    head = HEAD.pack(PICKLE, flags, 0, 0, 0, len(stream)) + stream
    return Encoded(head, [], [], len(head), [])


def _encode_plain_items(value: Any) -> Encoded | None:
    if len(value) <= PLAIN_ITEMS_MAX and _ATOMS.issuperset(map(type, value)):
        return _encode_plain(value)
    return None


def _encode_plain_dict(value: dict[Any, Any]) -> Encoded | None:
    if (
        len(value) <= PLAIN_ITEMS_MAX
        and _ATOMS.issuperset(map(type, value))
        and _ATOMS.issuperset(map(type, value.values()))
    ):
        return _encode_plain(value)
    return None


def _encode_bytes(value: bytes | bytearray) -> Encoded:
    nbytes = len(value)
    flags = 0 if type(value) is bytes else MUTABLE
    head = HEAD.pack(BYTES, flags, 0, 0, 1, 0) + BUFFER.pack(BUFFER_ALIGN, nbytes)
    return Encoded(head, [memoryview(value)], [BUFFER_ALIGN], BUFFER_ALIGN + nbytes, [])


@functools.lru_cache(256)
def _number_head(flags: int, name: str) -> bytes:
    itemsize = named_dtype(name).itemsize
    start = _align(HEAD.size + ARRAY_META.size + len(name), NUMBER_ALIGN)
    head = HEAD.pack(NUMBER, flags, 0, 0, 0, start + itemsize - HEAD.size)
    return (head + ARRAY_META.pack(0, 0, len(name), 0) + name.encode()).ljust(start, b"\0")


_INT_HEAD = _number_head(PY_INT, "<i8")
_FLOAT_HEAD = _number_head(PY_FLOAT, "<f8")
_COMPLEX_HEAD = _number_head(PY_COMPLEX, "<c16")
_BOOL_HEAD = _number_head(PY_BOOL, "|b1")
_NONE_HEAD = HEAD.pack(NUMBER, PY_NONE, 0, 0, 0, 0)
_INT, _FLOAT, _COMPLEX = struct.Struct("<q"), struct.Struct("<d"), struct.Struct("<dd")


def _in_head(head: bytes) -> Encoded:
    return Encoded(head, [], [], len(head), [])


def _encode_int(value: int) -> Encoded | None:
    try:
        return _in_head(_INT_HEAD + _INT.pack(value))
    except struct.error:  # Beyond int64.
        return _encode_plain(value)


def _encode_scalar(value: np.generic) -> Encoded | None:
    dtype = value.dtype
    name = dtype_name(dtype)
    if name is None or dtype.kind in "SU" or dtype.type is not type(value):
        return None
    return _in_head(_number_head(NUMPY_SCALAR, name) + value.tobytes())


@functools.lru_cache(4096)
def _array_head(
    name: str,
    shape: tuple[int, ...],
    order: str,
    contributors: tuple[int, ...] | None = None,
    buffer_offset: int | None = None,
) -> tuple[bytes, int, int]:
    """Head, place of the buffer, and size of the payload: a pure function, hence the cache."""
    nbytes = named_dtype(name).itemsize
    for size in shape:
        nbytes *= size
    who = contributors or ()
    meta = ARRAY_META.pack(len(shape), order == "F", len(name), len(who)) + name.encode()
    meta += struct.pack(f"<{len(shape)}Q{len(who)}I", *shape, *who)
    head_nbytes = HEAD.size + BUFFER.size + len(meta)
    offset = _align(head_nbytes) if buffer_offset is None else buffer_offset
    if offset < head_nbytes or offset % BUFFER_ALIGN:
        raise ValueError(
            f"the buffer of this array cannot stand at {offset}: its head takes {head_nbytes} "
            f"bytes, and buffers are aligned to {BUFFER_ALIGN}"
        )
    flags = 0 if contributors is None else HAS_CONTRIBUTORS
    head = HEAD.pack(ARRAY, flags, 0, 0, 1, len(meta)) + BUFFER.pack(offset, nbytes) + meta
    return head, offset, offset + nbytes


def encode_array_head(
    dtype: Any,
    shape: Sequence[int],
    order: str = "C",
    contributors: Sequence[int] | None = None,
    buffer_offset: int | None = None,
) -> tuple[bytes, int, int]:
    """The head of an array whose bytes are filled in later: (head, place of them, total bytes)."""
    name = dtype_name(np.dtype(dtype))
    if name is None:
        raise TypeError(f"arrays of dtype {dtype} have no description without pickle")
    if order not in ("C", "F"):
        raise ValueError(f"order is 'C' or 'F', not {order!r}")
    who = None if contributors is None else tuple(map(int, contributors))
    return _array_head(name, tuple(map(int, shape)), order, who, buffer_offset)


def _encode_array(array: Array) -> Encoded | None:
    name = dtype_name(array.dtype)
    if name is None:
        return None
    flags = array.flags
    order = "C"
    if not flags.c_contiguous:
        if flags.f_contiguous:
            order = "F"
        else:
            array = np.ascontiguousarray(array)
    head, offset, nbytes = _array_head(name, array.shape, order)
    return Encoded(head, [raw_bytes(array).raw()], [offset], nbytes, [])


_ENCODERS: dict[type, Callable[[Any], Encoded | None]] = {
    int: _encode_int,
    float: lambda value: _in_head(_FLOAT_HEAD + _FLOAT.pack(value)),
    complex: lambda value: _in_head(_COMPLEX_HEAD + _COMPLEX.pack(value.real, value.imag)),
    bool: lambda value: _in_head(_BOOL_HEAD + (b"\1" if value else b"\0")),
    type(None): lambda value: _in_head(_NONE_HEAD),
    str: _encode_plain,
    bytes: _encode_bytes,
    bytearray: _encode_bytes,
    tuple: _encode_plain_items,
    list: _encode_plain_items,
    dict: _encode_plain_dict,
    np.ndarray: _encode_array,
}


def _encode_other(value: Any) -> Encoded:
    if isinstance(value, np.generic):
        encoded = _encode_scalar(value)
        if encoded is not None:
            return encoded
    try:
        return _fill(Encoded, write_stream(value), PICKLE, 0)
    except MemoryError:
        raise
    except Exception as error:
        raise _unpicklable("value", value, error) from error


def _unpicklable(what: str, value: Any, error: BaseException) -> TypeError:
    return TypeError(f"cannot pickle {what} of type {type(value).__qualname__!r}: {error}")


E = TypeVar("E", bound=Encoded)


def _fill(cls: type[E], stream: Stream, kind: int, flags: int, prefix: bytes = b"") -> E:
    """Lay a written stream out as a payload."""
    buffers = [buffer.raw() for buffer in stream.buffers]
    refs = stream.refs
    meta_len = len(prefix) + sum(map(len, stream.chunks))
    if meta_len > META_BYTES_MAX:
        raise ValueError(
            f"{meta_len / 2**30:.1f} GiB of it are neither arrays nor buffers; the limit is "
            f"{META_BYTES_MAX / 2**30:.0f} GiB"
        )
    parts = [HEAD.pack(kind, flags, 0, len(refs), len(buffers), meta_len)]
    parts += [ref._id for ref in refs]
    end = HEAD.size + REF_BYTES * len(refs) + BUFFER.size * len(buffers) + meta_len
    offsets = []
    for buffer in buffers:
        offset = _align(end)
        end = offset + buffer.nbytes
        offsets.append(offset)
        parts.append(BUFFER.pack(offset, buffer.nbytes))
    head = b"".join((*parts, prefix, *stream.chunks))
    return cls(head, buffers, offsets, end, refs)


# --- reading values ------------------------------------------------------------------------------


def decode(
    mem: memoryview,
    *,
    make_ref: MakeRef,
    writable: bool = False,
    resolve: ResolveRef | None = None,
) -> Any:
    """The value of a payload: views of `mem`, read-only; or, if `writable`, private copies.

    `mem` may be longer than the payload. What comes out keeps the exporter of `mem` alive through
    the buffer protocol. An ERROR payload raises its exception.
    """
    kind, flags, _, _, _, meta_len = head = HEAD.unpack_from(mem)
    if kind == PICKLE:
        if flags & PLAIN:
            return pickle.loads(mem[HEAD.size : HEAD.size + meta_len])
        return _load(mem, head, 0, make_ref, resolve, writable)
    if kind == ARRAY:
        return _decode_array(mem, meta_len, writable)
    if kind == NUMBER:
        return _decode_number(mem, flags)
    if kind == BYTES:
        offset, nbytes = BUFFER.unpack_from(mem, HEAD.size)
        data = mem[offset : offset + nbytes]
        return bytearray(data) if flags & MUTABLE else data.tobytes()
    if kind == ERROR:
        raise decode_error(mem, make_ref)
    raise ValueError(f"not a payload: its first byte is {kind}")


def _load(
    mem: memoryview,
    head: tuple[int, ...],
    skip: int,
    make_ref: MakeRef,
    resolve: ResolveRef | None,
    writable: bool,
) -> Any:
    """Unpickle the stream in the meta, from `skip` on, with its refs and buffers."""
    _, _, _, n_refs, n_buffers, meta_len = head
    table = HEAD.size + REF_BYTES * n_refs
    meta = table + BUFFER.size * n_buffers
    ids = [bytes(mem[i : i + REF_BYTES]) for i in range(HEAD.size, table, REF_BYTES)]
    reading = Reading(ids, make_ref, resolve, writable)
    buffers = _buffers(mem, table, meta, writable) if n_buffers else ()
    return load_stream(mem[meta + skip : meta + meta_len], buffers, reading)


def _buffers(mem: memoryview, table: int, end: int, writable: bool) -> Iterator[Any]:
    mem = mem.toreadonly()
    for offset, nbytes in BUFFER.iter_unpack(mem[table:end]):
        part = mem[offset : offset + nbytes]
        yield _writable_copy(part) if writable else part


class LargeCopies:
    """How large buffers are copied for a reader that may write; a worker puts its own way here."""

    bytes_min = 1 << 20
    copy: Callable[[memoryview], Any] = bytearray


large_copies = LargeCopies()


def _writable_copy(part: memoryview) -> Any:
    if part.nbytes < large_copies.bytes_min:
        return bytearray(part)
    return large_copies.copy(part)


@functools.lru_cache(4096)
def _parse_array(
    meta: bytes, flags: int
) -> tuple[np.dtype[Any], tuple[int, ...], str, tuple[int, ...] | None]:
    """(dtype, shape, order, contributors) of an array's meta."""
    ndim, fortran, name_len, n_who = ARRAY_META.unpack_from(meta)
    end = ARRAY_META.size + name_len
    name = meta[ARRAY_META.size : end].decode()
    numbers = struct.unpack_from(f"<{ndim}Q{n_who}I", meta, end)
    who = numbers[ndim:] if flags & HAS_CONTRIBUTORS else None
    return named_dtype(name), numbers[:ndim], "F" if fortran else "C", who


_ARRAY_META_AT = HEAD.size + BUFFER.size


def _decode_array(mem: memoryview, meta_len: int, writable: bool) -> Array:
    offset, nbytes = BUFFER.unpack_from(mem, HEAD.size)
    meta = bytes(mem[_ARRAY_META_AT : _ARRAY_META_AT + meta_len])
    dtype, shape, order, _ = _parse_array(meta, 0)
    array: Array
    if not nbytes:
        array = np.empty(shape, dtype, order)  # type: ignore[call-overload]
        array.flags.writeable = writable
        return array
    # frombuffer keeps the memoryview; ndarray(buffer=) would keep only its owner, not an export.
    if not mem.readonly:
        mem = mem.toreadonly()
    if writable and nbytes >= large_copies.bytes_min:
        mem, offset = _writable_copy(mem[offset : offset + nbytes]), 0
        writable = False  # it is already
    array = np.frombuffer(mem, dtype, nbytes // dtype.itemsize, offset)
    if len(shape) != 1:
        array = array.reshape(shape, order=order)  # type: ignore[call-overload]
    return array.copy("K") if writable else array


def _number_at(mem: memoryview) -> tuple[str, int]:
    """Name of a number's dtype, and where its bytes stand."""
    name_len = ARRAY_META.unpack_from(mem, HEAD.size)[2]
    end = HEAD.size + ARRAY_META.size + name_len
    return str(mem[end - name_len : end], "ascii"), _align(end, NUMBER_ALIGN)


def _decode_number(mem: memoryview, flags: int) -> Any:
    if flags == PY_INT:
        return _INT.unpack_from(mem, len(_INT_HEAD))[0]
    if flags == PY_FLOAT:
        return _FLOAT.unpack_from(mem, len(_FLOAT_HEAD))[0]
    if flags == PY_NONE:
        return None
    if flags == PY_BOOL:
        return mem[len(_BOOL_HEAD)] != 0
    if flags == PY_COMPLEX:
        return complex(*_COMPLEX.unpack_from(mem, len(_COMPLEX_HEAD)))
    name, offset = _number_at(mem)
    return np.frombuffer(mem, named_dtype(name), 1, offset)[0]


def describe_array(mem: memoryview) -> ArrayInfo | None:
    """What array or number a payload holds, without unpickling; None if it holds neither."""
    kind, flags, _, _, _, meta_len = HEAD.unpack_from(mem)
    if kind == ARRAY:
        offset, nbytes = BUFFER.unpack_from(mem, HEAD.size)
        meta = bytes(mem[_ARRAY_META_AT : _ARRAY_META_AT + meta_len])
        dtype, shape, order, _ = _parse_array(meta, flags)
        return ArrayInfo(str(dtype_name(dtype)), shape, order, offset, nbytes)
    if kind == NUMBER and flags != PY_NONE:
        name, offset = _number_at(mem)
        return ArrayInfo(name, (), "C", offset, named_dtype(name).itemsize)
    return None


def read_contributors(mem: memoryview) -> tuple[int, ...] | None:
    """Which sources went into the array; None if it is not the result of a reduction."""
    kind, flags, _, _, _, meta_len = HEAD.unpack_from(mem)
    if kind != ARRAY or not flags & HAS_CONTRIBUTORS:
        return None
    return _parse_array(bytes(mem[_ARRAY_META_AT : _ARRAY_META_AT + meta_len]), flags)[3]


# --- calls ---------------------------------------------------------------------------------------


def encode_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> EncodedCall:
    """The arguments of a task.

    A ref or Future that is an argument, or stands inside list, tuple, dict (as key or value) or
    set, is marked to be replaced by its value; elsewhere, and inside `by_ref`, refs stay refs.
    """
    if not kwargs and len(args) <= PLAIN_ITEMS_MAX:
        simple = _encode_simple_call(args)
        if simple is not None:
            return simple
    value, flags = ((args, kwargs), 0) if kwargs else (args, ARGS_ONLY)
    try:
        written = _write_call(value, args)
        call = _fill(EncodedCall, written, PICKLE, flags)
    except MemoryError:
        raise
    except Exception as error:
        raise _blame_argument(args, kwargs, error) from error
    call.dependencies = written.dependencies
    return call


def _encode_simple_call(args: tuple[Any, ...]) -> EncodedCall | None:
    """A call of nothing but small immutable values and refs: most calls, and the quickest."""
    refs: list[ObjectRef[Any]] = []
    flags = PLAIN | ARGS_ONLY
    if _ATOMS.issuperset(map(type, args)):
        stream = pickle.dumps(args, 5)
    else:
        types: tuple[Any, ...] = ref_types()
        plain, places = list(args), []
        for place, arg in enumerate(args):
            if isinstance(arg, types):
                ref = arg if isinstance(arg, ObjectRef) else arg.ref
                if ref not in refs:
                    refs.append(ref)
                plain[place] = refs.index(ref)
                places.append(place)
            elif type(arg) not in _ATOMS:
                return None
        stream = pickle.dumps((plain, places), 5)
        flags |= REFS_AT
    head = HEAD.pack(PICKLE, flags, 0, len(refs), 0, len(stream))
    head = b"".join((head, *[ref._id for ref in refs], stream))
    call = EncodedCall(head, [], [], len(head), refs)
    call.dependencies = refs.copy()
    return call


def _write_call(value: Any, args: tuple[Any, ...]) -> Stream:
    # Many calls hold no ref at all: then nobody has to walk through their lists in Python.
    types = ref_types()
    if not any(isinstance(arg, types) for arg in args):
        try:
            return write_stream(value, stop_at_refs=True)
        except RefMet:
            pass
    return write_stream(_mark(value, types, {}, {}))


def _mark(
    value: Any,
    types: tuple[Any, ...],
    marks: dict[ObjectRef[Any], Resolve],
    memo: dict[int, Any],
) -> Any:
    """A copy of nested exact containers with `Resolve` in the place of refs, cycles kept."""
    cls = type(value)
    if cls in _ATOMS:
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
        copy = memo.setdefault(id(value), cls(items))  # A cycle through a tuple closed it below.
    return copy


_WALKED = frozenset({list, tuple, dict, set})


def _blame_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], error: BaseException
) -> TypeError:
    labelled = [(f"argument {i}", arg) for i, arg in enumerate(args)]
    labelled += [(f"argument {name}=", arg) for name, arg in kwargs.items()]
    for what, arg in labelled:
        try:
            write_stream(arg)
        except Exception as cause:
            return _unpicklable(what, arg, cause)
    return _unpicklable("arguments", args, error)


def decode_call(
    mem: memoryview, make_ref: MakeRef, resolve: ResolveRef, writable: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call: arrays by value are the task's own, refs what `resolve` gives."""
    head = HEAD.unpack_from(mem)
    flags, n_refs, meta_len = head[1], head[3], head[5]
    if flags & PLAIN:
        start = HEAD.size + REF_BYTES * n_refs
        args = pickle.loads(mem[start : start + meta_len])
        if flags & REFS_AT:
            args, places = args
            values = [resolve(make_ref(id)) for id in read_refs(mem)]
            for place in places:
                args[place] = values[args[place]]
        return tuple(args), {}
    value = _load(mem, head, 0, make_ref, resolve, writable)
    return (value, {}) if flags & ARGS_ONLY else value


# --- errors --------------------------------------------------------------------------------------


class RemoteTraceback(Exception):
    """The traceback of an exception where it was raised, as text: its `__cause__` here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def encode_error(exc: BaseException, traceback_text: str | None = None) -> Encoded:
    """The payload of a failure. Never raises: what cannot be pickled arrives as TaskError.

    The text defaults to the formatted traceback, with those of `__cause__` and `__context__`.
    """
    summary = _summary(exc)
    if traceback_text is None:
        try:
            traceback_text = "".join(traceback.format_exception(exc))
        except Exception:
            traceback_text = summary + "\n"
    texts = [part.encode(errors="backslashreplace") for part in (traceback_text, summary)]
    prefix = ERROR_META.pack(*map(len, texts)) + b"".join(texts)
    for bare in (False, True):
        try:
            stream = write_stream(BareException(exc) if bare else exc)
            encoded = _fill(Encoded, stream, ERROR, 0, prefix)
            if _surely_loads(exc) or type(_load_error(encoded)) is type(exc):
                return encoded
        except Exception:
            continue
    return _fill(Encoded, Stream(), ERROR, 0, prefix)


def _summary(exc: BaseException) -> str:
    try:
        return f"{type(exc).__qualname__}: {exc}"
    except Exception:
        return f"{type(exc).__qualname__}: (its text cannot be formatted)"


def _surely_loads(exc: BaseException) -> bool:
    """Nothing but a builtin class and plain values: no need to try."""
    return (
        type(exc).__module__ == "builtins"
        and not exc.__dict__
        and _ATOMS.issuperset(map(type, exc.args))
    )


def _load_error(encoded: Encoded) -> Any:
    mem = memoryview(encoded.tobytes())
    return _load(mem, HEAD.unpack_from(mem), _error_texts(mem)[2], ObjectRef, None, False)


def _error_texts(mem: memoryview) -> tuple[str, str, int]:
    """(traceback, summary, how much of the meta they take) of an ERROR."""
    head = HEAD.unpack_from(mem)
    meta = HEAD.size + REF_BYTES * head[3] + BUFFER.size * head[4]
    text_len, summary_len = ERROR_META.unpack_from(mem, meta)
    start = meta + ERROR_META.size
    middle, end = start + text_len, start + text_len + summary_len
    text = str(mem[start:middle], "utf-8", "replace")
    return text, str(mem[middle:end], "utf-8", "replace"), end - meta


def decode_error(mem: memoryview, make_ref: MakeRef) -> BaseException:
    """The exception of an ERROR payload, caused by its RemoteTraceback. Never raises."""
    text, summary = "", "a failure whose description cannot be read"
    loaded: Any = None
    try:
        text, summary, skip = _error_texts(mem)
        head = HEAD.unpack_from(mem)
        if head[5] > skip:
            loaded = _load(mem, head, skip, make_ref, None, False)
    except Exception:
        pass  # The reader lacks a module, or the exception's own code fails: the text is left.
    error = loaded if isinstance(loaded, BaseException) else TaskError(summary)
    # Past a __setattr__ of its own, which may refuse.
    BaseException.__setattr__(error, "__cause__", RemoteTraceback(text))
    return error
