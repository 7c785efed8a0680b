"""Writes failures as payloads, and finds the part of a value that cannot be pickled.

When an exception from a task is pickled or loaded, its class may run any code. This module does not
rely on that code, so that neither encoding nor decoding raises an exception.

A message between hosts can only contain a short payload. The sending node cannot shorten a payload,
because nodes never unpickle. Therefore a payload of more than WHOLE_BYTES_MAX ends with a second
complete payload, which is a shorter form of the same failure.
"""

from __future__ import annotations

import functools
import itertools
import struct
import traceback
import types
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize.classes import annotations_of, compiled_metaclass
from hoplite_mp._serialize.code import importable
from hoplite_mp._serialize.layout import (
    BUFFER,
    ERROR,
    ERROR_META,
    HAS_SHORT_FORM,
    HEAD,
    PICKLE,
    REF_BYTES,
    Encoded,
    PickleStream,
    align,
    unpack_head,
)
from hoplite_mp._serialize.picklers import write_stream
from hoplite_mp._serialize.reducers import BareException
from hoplite_mp._serialize.streams import (
    EXITS,
    UNPICKLABLE,
    MakeRef,
    all_atoms,
    fill,
    load_within,
    text_of,
)
from hoplite_mp.errors import HopliteError, TaskError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType


# Maximum size of an error payload in a message between hosts (PAYLOAD_BYTES_MAX in
# _protocol/fields.py). Higher: longer errors arrive complete. Lower: other messages wait less.
WHOLE_BYTES_MAX = 80 << 10
SHORT_FORM_LENGTH = struct.Struct("<Q")


class RemoteTraceback(Exception):
    """The text of an exception's traceback in the process that raised it. In other processes, this
    is the `__cause__` of the exception."""

    __module__ = "hoplite_mp._serialize"  # the name that tracebacks show and pickle looks up

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f'\n"""\n{self.text}"""'


def encode_error(exc: BaseException, traceback_text: str | None = None) -> Encoded:
    """The payload of a failure. Never raises; an exception that cannot be pickled arrives as a
    TaskError.

    `traceback_text` defaults to the formatted traceback, including the tracebacks of `__cause__`
    and `__context__`.
    """
    exc = _exit_within(exc)
    encoded, traceback_text = _encode(exc, traceback_text)
    return _with_short_form(encoded, exc, traceback_text)


def _encode(exc: BaseException, traceback_text: str | None) -> tuple[Encoded, str]:
    """The payload without a short form, and the traceback's text."""
    summary = _summary(exc)
    if traceback_text is None:
        traceback_text = format_error(exc, get_traceback(exc))
    texts = [part.encode(errors="backslashreplace") for part in (traceback_text, summary)]
    prefix = ERROR_META.pack(*map(len, texts)) + b"".join(texts)
    for bare in (False, True):
        try:
            stream = write_stream(_bare(exc) if bare else exc)
            encoded = fill(Encoded, stream, ERROR, 0, prefix)
            if _surely_loads(exc) or type(_load_error(encoded)) is type(exc):
                return encoded, traceback_text
        except KeyboardInterrupt:
            raise
        except BaseException:  # the exception's own code may raise anything
            continue
    return fill(Encoded, PickleStream(), ERROR, 0, prefix), traceback_text


def _exit_within(exc: BaseException) -> BaseException:
    """The exception for which `exit_error` made this TaskError; other exceptions unchanged."""
    if type(exc) is TaskError and EXIT_MARK in vars(exc) and isinstance(exc.__cause__, EXITS):
        return exc.__cause__
    return exc


def exit_error(error: BaseException) -> TaskError:
    """The error to raise for a task that has raised SystemExit, KeyboardInterrupt or
    GeneratorExit. These exceptions would stop the program, so they become the cause of a
    TaskError."""
    made = TaskError(f"the task raised {_summary(error)}".removesuffix(": "))
    made.__cause__ = error
    vars(made)[EXIT_MARK] = True
    return made


# An attribute that marks the TaskErrors made by `exit_error`. Only these are replaced by their
# cause; TaskErrors that a program raises itself, or that are raised for a value that could not be
# loaded, are not.
EXIT_MARK = "_exit"


def format_error(exc: BaseException, frames: TracebackType | None) -> str:
    """The text of the exception's traceback with these frames. Never raises, whatever the
    exception's class does."""
    try:
        return "".join(traceback.format_exception(type(exc), exc, frames))
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "".join(traceback.format_tb(frames)) + _summary(exc) + "\n"


def drop_traceback(exc: BaseException) -> None:
    """Drops the exception's traceback, which releases the objects in its frames. (A class may not
    allow `exc.__traceback__ = None`.)"""
    BaseException.with_traceback(exc, None)


def _with_short_form(encoded: Encoded, exc: BaseException, traceback_text: str) -> Encoded:
    """The same payload, with a short form at its end if it is long."""
    if encoded.nbytes <= WHOLE_BYTES_MAX:
        return encoded
    short = _encode_short(exc, traceback_text, WHOLE_BYTES_MAX)
    if not set(short.refs) <= set(encoded.refs):
        return encoded  # no process would hold the other refs of the short form
    head = encoded.head[:1] + bytes((encoded.head[1] | HAS_SHORT_FORM,)) + encoded.head[2:]
    at = align(encoded.nbytes)
    tail = short.tobytes() + SHORT_FORM_LENGTH.pack(short.nbytes)
    buffers, offsets = [*encoded.buffers, memoryview(tail)], [*encoded.offsets, at]
    return Encoded(head, buffers, offsets, at + len(tail), encoded.refs)


def short_error(mem: memoryview) -> bytes:
    """A copy of an ERROR payload in at most WHOLE_BYTES_MAX bytes: the whole payload or its short
    form. If a long payload has no short form, the result is a TaskError with a part of its text.
    Never unpickles."""
    if mem.nbytes <= WHOLE_BYTES_MAX:
        return bytes(mem)
    if unpack_head(mem)[1] & HAS_SHORT_FORM:
        end = mem.nbytes - SHORT_FORM_LENGTH.size
        (nbytes,) = SHORT_FORM_LENGTH.unpack_from(mem, end)
        if HEAD.size <= nbytes <= min(end, WHOLE_BYTES_MAX):
            return bytes(mem[end - nbytes : end])
    text, summary, _ = _error_texts(mem)
    texts = [_cut(part, WHOLE_BYTES_MAX // 16).encode(errors="replace") for part in (text, summary)]
    prefix = ERROR_META.pack(*map(len, texts)) + b"".join(texts)
    return fill(Encoded, PickleStream(), ERROR, 0, prefix).tobytes()


def encode_short_error(exc: BaseException, traceback_text: str, nbytes_max: int) -> Encoded:
    """The payload of a failure in at most this number of bytes. The exception's type is kept if
    possible; its message and traceback are cut in the middle until they fit. If the type does not
    fit, the payload is a TaskError with a few words, for which a few hundred bytes always suffice.
    Never raises."""
    exc = _exit_within(exc)
    short = _encode_short(exc, traceback_text, nbytes_max)
    encoded = _with_short_form(short, exc, traceback_text)
    if encoded.nbytes <= nbytes_max:
        return encoded
    return _encode_short(exc, traceback_text, min(nbytes_max, WHOLE_BYTES_MAX))


def _encode_short(exc: BaseException, traceback_text: str, nbytes_max: int) -> Encoded:
    message = _summary(exc).partition(": ")[2]
    for share in SHARES:
        chars = int(nbytes_max * share)
        text = _cut(traceback_text, chars)
        try:
            encoded, _ = _encode(exc, text)
            if encoded.nbytes <= nbytes_max:
                return encoded
        except Exception:
            pass
        for args in (
            tuple(_short(part, chars // 4) for part in _args_of(exc)),
            (_cut(message, chars),),
        ):
            parts = text, type(exc).__qualname__
            texts = [part.encode(errors="backslashreplace") for part in parts]
            prefix = ERROR_META.pack(*map(len, texts)) + b"".join(texts)
            try:
                stream = write_stream(BareException(type(exc), args, {}))
                encoded = fill(Encoded, stream, ERROR, 0, prefix)
                if encoded.nbytes <= nbytes_max and type(_load_error(encoded)) is type(exc):
                    return encoded
            except KeyboardInterrupt:
                raise
            except BaseException:
                continue
    summary = _cut(_summary(exc), WORDS_CHARS_MAX).encode(errors="backslashreplace")
    return fill(Encoded, PickleStream(), ERROR, 0, ERROR_META.pack(0, len(summary)) + summary)


# The shares of the maximum size that are tried for the traceback. The message gets the same share.
# The last share leaves no space for either of them.
SHARES = (0.4, 0.2, 0.1, 0.05, 0.0)
WORDS_CHARS_MAX = 40


def _cut(text: str, chars_max: int) -> str:
    """The beginning and the end of a text, with a mark between them."""
    if len(text) <= chars_max:
        return text
    if chars_max < len(CUT) * 4:
        return text[:chars_max]
    head = chars_max // 3
    return f"{text[:head]}{CUT}{text[len(text) - (chars_max - head - len(CUT)) :]}"


CUT = " [... cut ...] "


def _short(part: Any, chars_max: int) -> Any:
    """An argument of an exception, shortened: a text is cut, a number is kept, and any other object
    is replaced by the name of its type."""
    if type(part) is str:
        return _cut(part, chars_max)
    if part is None or (type(part) in (bool, int, float) and abs(part) < 1e300):
        return part
    return f"<{type(part).__qualname__}, too large to be sent>"


def _summary(exc: BaseException) -> str:
    return f"{type(exc).__qualname__}: {text_of(exc)}"


def _bare(exc: BaseException) -> BareException:
    """`exc` with only the attributes that can be sent."""
    state = {name: _portable(part) for name, part in _dict_of(exc).items()}
    state = {name: part for name, part in state.items() if _travels(part)}
    return BareException(type(exc), _portable(_args_of(exc)), state)


def _portable(value: Any) -> Any:
    """A copy of the value in which each exception that cannot be sent is replaced: by a copy that
    is made without `__init__` and without some attributes or, as a last resort, by a TaskError."""
    if type(value) in (list, tuple):
        return type(value)(map(_portable, value))
    if not issubclass(type(value), BaseException) or _travels(value):
        return value
    bare = _bare(value)
    return bare if _travels(bare) else TaskError(_summary(value))


def portable_error(exc: BaseException) -> Any:
    """The object to pickle in place of an exception inside a value, because pickling or loading
    the exception may fail. Never raises."""
    return exc if _surely_loads(exc) else _portable(exc)


def with_text(error: BaseException, text: str) -> BaseException:
    """Sets this remote traceback as the cause of the exception, and returns the exception."""
    _set_cause(error, RemoteTraceback(text))
    return error


def _travels(value: Any) -> bool:
    """Whether the value can be written and loaded, and the loaded object has the same type."""
    kind = value.kind if type(value) is BareException else type(value)
    try:
        mem = memoryview(fill(Encoded, write_stream(value), PICKLE, 0).tobytes())
        loaded = load_within(mem, unpack_head(mem), 0, ObjectRef, None, False)
        return type(loaded) is kind
    except KeyboardInterrupt:
        raise
    except BaseException:
        return False


def _surely_loads(exc: BaseException) -> bool:
    """Whether loading is sure to succeed, because the class is builtin and the arguments are
    plain."""
    return (
        type(exc).__module__ == "builtins" and not exc.__dict__ and all_atoms(map(type, exc.args))
    )


# Accessors for attributes that some classes redefine or do not allow to be set.
get_traceback = vars(BaseException)["__traceback__"].__get__
_set_cause = vars(BaseException)["__cause__"].__set__
_args_of = vars(BaseException)["args"].__get__
_dict_of = vars(BaseException)["__dict__"].__get__


def _load_error(encoded: Encoded) -> Any:
    mem = memoryview(encoded.tobytes())
    return load_within(mem, unpack_head(mem), _error_texts(mem)[2], ObjectRef, None, False)


def _error_texts(mem: memoryview) -> tuple[str, str, int]:
    """The traceback and the summary in an ERROR payload, and their size in the meta."""
    head = unpack_head(mem)
    meta = HEAD.size + REF_BYTES * head[3] + BUFFER.size * head[4]
    text_len, summary_len = ERROR_META.unpack_from(mem, meta)
    start = meta + ERROR_META.size
    middle, end = start + text_len, start + text_len + summary_len
    text = str(mem[start:middle], "utf-8", "replace")
    return text, str(mem[middle:end], "utf-8", "replace"), end - meta


def error_text(mem: memoryview) -> str:
    """The traceback in an ERROR payload, or the summary if there is no traceback, read without
    unpickling."""
    text, summary, _ = _error_texts(mem)
    return (text or summary).strip()


def error_name(mem: memoryview) -> str:
    """The name of the exception's class in an ERROR payload, read without unpickling."""
    return _error_texts(mem)[1].partition(":")[0].rpartition(".")[2]


def decode_error(mem: memoryview, make_ref: MakeRef) -> BaseException:
    """The exception of an ERROR payload. If the payload has a traceback, the exception's
    `__cause__` is a RemoteTraceback. Never raises."""
    text, summary = "", "a failure whose description cannot be read"
    loaded: Any = None
    try:
        text, summary, skip = _error_texts(mem)
        head = unpack_head(mem)
        if head[5] > skip:
            loaded = load_within(mem, head, skip, make_ref, None, False)
    except UNPICKLABLE:
        pass  # a module is missing here, or the exception's own code fails; only the text is used
    error = loaded if issubclass(type(loaded), BaseException) else TaskError(summary)
    return with_text(error, text) if text else error


# Finds the part of a value that cannot be pickled, for error messages. This search runs only after
# pickling has failed. Each part is pickled alone, and the search continues inside the first part
# that fails. Parts are the globals, closure and defaults of functions, the attributes of classes
# and objects, and the items of containers.


# The maximum number of parts that the search pickles, and of items that it tries in one container.
# Higher: more faulty parts are found, but the error is raised later.
PARTS_MAX = 300
ITEMS_MAX = 100
DEPTH_MAX = 20
NAME_CHARS_MAX = 60

ADVICE = "create it in the task or in an initializer, or leave it out with `__getstate__`"


def blamed(value: Any) -> str:
    """The end of an error text: ": ", the name of the part that cannot be pickled, and advice. ""
    if no part can be named. Never raises."""
    try:
        path = _search(value)
    except (Exception, SystemExit, GeneratorExit):
        return ""
    if not path or (isinstance(path[-1][1], type) and compiled_metaclass(path[-1][1])):
        return ""  # the error already names such a class
    whole = " in ".join(label for label, _ in reversed(path))
    return f": {whole} is a {type(path[-1][1]).__qualname__}; {ADVICE}"


def _search(value: Any) -> list[tuple[str, Any]]:
    path: list[tuple[str, Any]] = []
    tried = itertools.count()
    seen = {id(value)}
    while len(path) < DEPTH_MAX:
        for label, part in _parts(value):
            if id(part) in seen:
                continue
            if next(tried) >= PARTS_MAX:
                return path
            if not _can_travel(part):
                seen.add(id(part))
                path.append((label, part))
                value = part
                break
        else:
            break
    return path


def _can_travel(part: Any) -> bool:
    try:
        write_stream(part)
    except (MemoryError, HopliteError):
        return True  # the part itself is not the cause
    except UNPICKLABLE:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields (description of the part, part) for each part that is pickled with a value."""
    if isinstance(value, types.FunctionType):
        if not importable(value):
            yield from _parts_of_function(value)
    elif isinstance(value, types.MethodType):
        yield f"the object of the method {value.__name__}()", value.__self__
    elif isinstance(value, functools.partial):
        yield "the function of a partial", value.func
        yield from _items("argument", enumerate(value.args))
        yield from _items("argument", value.keywords.items())
    elif isinstance(value, functools._lru_cache_wrapper):
        yield "the function behind a cache", value.__wrapped__
    elif isinstance(value, type):
        if not importable(value) and compiled_metaclass(value) is None:
            yield from _items(f"of class {value.__qualname__}", _attributes(value), "attribute")
            yield from ((f"base class {base.__qualname__}", base) for base in value.__bases__)
            if not importable(type(value)):
                yield f"the metaclass {type(value).__qualname__}", type(value)
    elif isinstance(value, types.ModuleType):
        yield from _items(f"of module {value.__name__}", vars(value).items(), "global")
    elif isinstance(value, dict):
        yield from _items("item", value.items())
        yield from (("a key of the dict", key) for key in itertools.islice(value, ITEMS_MAX))
    elif isinstance(value, (list, tuple)):
        yield from _items("item", enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from (("an item of the set", one) for one in itertools.islice(value, ITEMS_MAX))
    else:
        yield from _parts_of_object(value)


def _attributes(cls: type) -> list[tuple[str, Any]]:
    """The attributes that are sent with a class. Descriptors of slots are not sent, because
    readers recreate them."""
    made = types.MemberDescriptorType, types.GetSetDescriptorType
    return [(name, part) for name, part in vars(cls).items() if not isinstance(part, made)]


def _items(what: str, items: Any, kind: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in itertools.islice(list(items), ITEMS_MAX):
        shown = repr(name)[:NAME_CHARS_MAX] if type(name) in (str, int, bytes) else "?"
        yield (f"the {kind} {shown} {what}" if kind else f"{what} {shown}"), part


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    name = f"of {function.__qualname__.rpartition('<locals>.')[2]}()"
    from cloudpickle import cloudpickle

    scope = function.__globals__
    for key in cloudpickle._extract_code_globals(function.__code__):
        if key in scope:
            yield f"the global {key!r} {name}", scope[key]
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for key, cell in cells:
        try:
            yield f"the variable {key!r} in the closure {name}", cell.cell_contents
        except ValueError:  # the cell is empty
            continue
    defaults = function.__defaults__ or ()
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    named = zip(positional[len(positional) - len(defaults) :], defaults, strict=True)
    for key, part in (*named, *(function.__kwdefaults__ or {}).items()):
        yield f"the default of the parameter {key!r} {name}", part
    yield from _items(name, vars(function).items(), "attribute")
    yield from _items(name, annotations_of(function).items(), "annotation")


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if not importable(kind):
        yield f"the class {kind.__qualname__}", kind
    try:
        reduced = value.__reduce_ex__(5)
    except UNPICKLABLE:  # the value itself cannot be pickled
        return
    if not isinstance(reduced, tuple):
        return
    state = reduced[2] if len(reduced) > 2 else None
    parts = state if isinstance(state, tuple) else (state,)
    for one in parts:
        if isinstance(one, dict):
            yield from _items(f"of a {kind.__qualname__}", one.items(), "attribute")
        elif one is not None:
            yield f"the state of a {kind.__qualname__}", one
    for one in reduced[1]:
        if not isinstance(one, type):
            yield f"an argument that makes a {kind.__qualname__}", one
    if len(reduced) > 3 and reduced[3] is not None and isinstance(value, list):
        yield from _items("item", enumerate(value))
