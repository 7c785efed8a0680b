"""The functions of tasks as bytes, with a name in front that is read without unpickling.

They are no payloads, because the sender chooses where they are stored.
"""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.signals import is_interruption
from hoplite_mp._serialize.errors import blamed
from hoplite_mp._serialize.layout import PickleStream
from hoplite_mp._serialize.namespaces import BroughtGlobals, collecting
from hoplite_mp._serialize.out_of_band import Keep, OutOfBand, bringing
from hoplite_mp._serialize.picklers import LightPickler, heavy_pickler
from hoplite_mp._serialize.reading import load_foreign
from hoplite_mp._serialize.streams import UNPICKLABLE, ExitWhilePickling, NotPicklable, text_of
from hoplite_mp.errors import HopliteError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hoplite_mp._common.ref import ObjectRef


def encode_function(function: Callable[..., Any], keep: Keep | None = None) -> bytes:
    """A function for a task: by reference where readers can import it, else by value. Its large
    arrays travel in the stream; `keep` marks them."""
    return encode_with_aside(function, keep, False)[0]


def encode_with_aside(
    function: Callable[..., Any], keep: Keep | None, beside: bool = True
) -> tuple[bytes, list[ObjectRef[Any]], bool]:
    """A function for a task; the objects in which its large arrays travel beside it; and whether it
    carries refs. Those travel as in a foreign pickle and keep no object alive on the way, so the
    caller keeps `function` alive until it has arrived.
    """
    name = _display_name(function).encode(errors="replace")[:255]
    stream = PickleStream()
    aside = None if keep is None or not beside else OutOfBand(keep)
    try:
        try:
            pickler: Any = LightPickler(stream, 5)
            pickler.aside = aside
            pickler.dump(function)
        except (MemoryError, HopliteError):
            raise
        except Exception:
            stream = PickleStream()
            aside = None if keep is None or not beside else OutOfBand(keep)
            pickler = heavy_pickler()(stream, 5)
            pickler.aside = aside
            pickler.keep = keep
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
    return data, [] if aside is None else aside.refs, pickler.holds_refs


def _in_band(chunk: Any) -> Any:
    """A chunk as plain bytes. Without a `buffer_callback` the pickler writes a large buffer as the
    PickleBuffer itself, whose memory may be in an order that `join` does not take."""
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
    """The function that `encode_function` wrote."""
    return load_foreign(data[1 + data[0] :])


def decode_with_carried(
    data: bytes | memoryview, ids: Sequence[bytes] = ()
) -> tuple[Any, BroughtGlobals]:
    """That function, and the globals to check before each of its runs. `ids`: of the objects
    beside it."""
    with collecting() as carried, bringing(ids) as brought:
        function = decode_function(data)
    carried.nbytes = len(data) + brought.nbytes
    return function, carried
