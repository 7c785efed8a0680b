"""Writes pickle streams as payloads, with their refs and buffers, and reads them.

The modules `values`, `calls` and `errors` use these functions.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from hoplite_mp._common.ref import ObjectRef
from hoplite_mp._serialize.layout import (
    BUFFER,
    HEAD,
    META_BYTES_MAX,
    PICKLE,
    PLAIN,
    REF_BYTES,
    Encoded,
    align,
    malformed,
    pack_buffer,
    pack_head,
    writable_copy,
)
from hoplite_mp._serialize.reading import Reading, load_stream
from hoplite_mp.errors import TaskError

if TYPE_CHECKING:
    from hoplite_mp._serialize.layout import PickleStream


MakeRef = Callable[[bytes], ObjectRef[Any]]
ResolveRef = Callable[[ObjectRef[Any]], Any]

# Types whose instances are pickled without any function of this package in the stream.
ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes})
all_atoms = ATOMS.issuperset  # called with types
# Exceptions that stop a program. If a task raises one of them, it becomes the cause of a
# TaskError.
EXITS = (SystemExit, KeyboardInterrupt, GeneratorExit)
# The errors that a failing reducer may raise. A KeyboardInterrupt is more likely the user's
# Ctrl-C.
UNPICKLABLE = (Exception, SystemExit, GeneratorExit)
cause_of = vars(BaseException)["__cause__"].__get__  # some classes redefine the attribute
# Containers with more items than this are passed to the picklers, because checking each item's type
# would take longer.
PLAIN_ITEMS_MAX = 64


def encode_plain(value: Any, flags: int = PLAIN) -> Encoded:
    """The payload of a value for which plain pickle suffices."""
    stream = pickle.dumps(value, 5)
    if (error := _too_long(len(stream))) is not None:
        raise unpicklable("value", value, error) from error
    head = pack_head(PICKLE, flags, 0, 0, 0, len(stream)) + stream
    return Encoded(head, [], [], len(head), [])


class NotPicklable(TypeError):
    """The error for a value that cannot be pickled; the message is for users."""

    __module__ = "hoplite_mp._serialize"  # the name that tracebacks show and pickle looks up
    place = ""  # ": " and the part of the value that fails, if known

    @property
    def reason(self) -> BaseException:
        """The exception that pickling raised, with this message."""
        cause = self.__cause__
        return self if cause is None else reworded(cause, str(self))


def failure_within(error: BaseException) -> BaseException:
    """For a NotPicklable, the exception that pickling has raised; any other error unchanged."""
    cause = error.__cause__ if issubclass(type(error), NotPicklable) else None
    return error if cause is None else cause


class ExitWhilePickling(TaskError, NotPicklable):
    """A reducer of the value has raised SystemExit or GeneratorExit, which is the cause."""

    __module__ = "hoplite_mp._serialize"


def text_of(error: BaseException) -> str:
    """The text of an exception. Never raises, whatever its class does."""
    try:
        return str(error)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return "(its text cannot be formatted)"


def reworded(error: BaseException, text: str) -> BaseException:
    """An exception of the same type with this text, if the type is known to accept one; otherwise
    the same exception with the text as a note."""
    kind: Any = type(error)
    known = kind.__module__ in ("builtins", "pickle", "_pickle") and not issubclass(kind, EXITS)
    if known and len(error.args) == 1:
        made: BaseException = kind(text)
        if isinstance(made, ImportError):
            made.name, made.path = error.name, error.path  # type: ignore[attr-defined]
        made.__cause__ = error
        return made
    try:
        BaseException.add_note(error, text)
    except Exception:  # the class does not allow attributes
        BaseException.__setattr__(error, "__notes__", [text])
    return error


def unpicklable(label: str, value: Any, error: BaseException, place: str = "") -> NotPicklable:
    """The exception to raise because `value` cannot be pickled. `label`: a name for the value.
    `place`: see NotPicklable."""
    text = f"cannot pickle {label} of type {type(value).__qualname__!r}: "
    if issubclass(type(error), EXITS):
        text += f"it raised {type(error).__qualname__}: {text_of(error)}"
        return ExitWhilePickling(text.removesuffix(": "))
    made = NotPicklable(text + text_of(error) + place)
    made.place = place
    return made


def _too_long(nbytes: int) -> ValueError | None:
    """The error for a pickle stream that is too long for the length field in the head."""
    if nbytes <= META_BYTES_MAX:
        return None
    return ValueError(
        f"{nbytes / 2**30:.1f} GiB of it are neither arrays nor buffers; the limit is "
        f"{META_BYTES_MAX / 2**30:.0f} GiB"
    )


E = TypeVar("E", bound=Encoded)


def fill(cls: type[E], stream: PickleStream, kind: int, flags: int, prefix: bytes = b"") -> E:
    """Makes a payload from a written stream."""
    buffers = [buffer.raw() for buffer in stream.buffers]
    refs = stream.refs
    meta_len = len(prefix) + sum(map(len, stream.chunks))
    if (error := _too_long(meta_len)) is not None:
        raise error
    parts = [pack_head(kind, flags, 0, len(refs), len(buffers), meta_len)]
    parts += [ref._id for ref in refs]
    end = HEAD.size + REF_BYTES * len(refs) + BUFFER.size * len(buffers) + meta_len
    offsets = []
    for buffer in buffers:
        offset = align(end)
        end = offset + buffer.nbytes
        offsets.append(offset)
        parts.append(pack_buffer(offset, buffer.nbytes))
    head = b"".join((*parts, prefix, *stream.chunks))
    return cls(head, buffers, offsets, end, refs)


def load_within(
    mem: memoryview,
    head: tuple[int, ...],
    skip: int,
    make_ref: MakeRef,
    resolve: ResolveRef | None,
    writable: bool,
) -> Any:
    """Unpickles the stream that begins `skip` bytes into the meta, with its refs and buffers."""
    _, _, _, n_refs, n_buffers, meta_len = head
    table = HEAD.size + REF_BYTES * n_refs
    meta = table + BUFFER.size * n_buffers
    if meta + meta_len > len(mem) or skip > meta_len:
        raise malformed(mem)
    ids = [bytes(mem[i : i + REF_BYTES]) for i in range(HEAD.size, table, REF_BYTES)]
    reading = Reading(ids, make_ref, resolve, writable)
    buffers = _buffers(mem, table, meta, writable) if n_buffers else ()
    return load_stream(mem[meta + skip : meta + meta_len], buffers, reading)


def _buffers(mem: memoryview, table: int, end: int, writable: bool) -> Iterator[Any]:
    mem = mem.toreadonly()
    for offset, nbytes in BUFFER.iter_unpack(mem[table:end]):
        if offset + nbytes > len(mem):
            raise malformed(mem)
        part = mem[offset : offset + nbytes]
        yield writable_copy(part) if writable else part
