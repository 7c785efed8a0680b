"""The two picklers that write streams.

The *light* pickler is the standard pickler in C. It calls `reducer_override` for every object of a
type that the C code does not support. (`persistent_id` would work for refs, too, but costs a Python
call for every element of every list.) The *heavy* pickler is cloudpickle's. It is used only if the
light pickler fails, usually because the value contains code that readers cannot import.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hoplite_mp._common.signals import is_interruption
from hoplite_mp._serialize.by_value import reduce_by_value
from hoplite_mp._serialize.captured_globals import Scan
from hoplite_mp._serialize.code import by_value_modules
from hoplite_mp._serialize.layout import PickleStream
from hoplite_mp._serialize.reducers import RefMet, reducer_override

if TYPE_CHECKING:
    from hoplite_mp._serialize.out_of_band import Borrowed

MakeScan = Callable[[], Scan]


class LightPickler(pickle.Pickler):
    """The standard pickler, except for refs and arrays. Raises NeedCloudpickle for objects that
    need cloudpickle."""

    by_value = False
    stream: PickleStream | None = None  # None: refs are written as by a foreign pickler
    stop_at_refs = False
    holds_refs = False  # True: the value has refs, which were written as by a foreign pickler
    out_of_band: Scan | Borrowed | None = None  # None: no arrays become separate objects
    reducer_override = reducer_override


@functools.cache
def heavy_pickler() -> type[pickle.Pickler]:
    """The class of the heavy pickler, made at its first use, because it imports cloudpickle."""
    import cloudpickle

    for module in by_value_modules.values():
        cloudpickle.register_pickle_by_value(module)
    # The name of the script's module in a process spawned by multiprocessing, and in the workers of
    # a cluster that such a process has opened.
    cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES.add("__mp_main__")

    class HeavyPickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
        by_value = True
        reduce_by_value = reduce_by_value
        scan: Scan  # set for each pickler
        stream: PickleStream | None = None
        stop_at_refs = False
        holds_refs = False
        out_of_band: Scan | Borrowed | None = None
        reducer_override = reducer_override

    return HeavyPickler


def write_stream(
    value: Any, *, stop_at_refs: bool = False, scan: MakeScan | None = None, beside: bool = True
) -> PickleStream:
    """Pickles `value`. Its large buffers and its refs are kept beside the stream.

    `scan` makes a Scan, which stores large globals of functions as separate objects and adds the
    objects to the refs. With `beside=False`, the globals stay in the stream, and the Scan only
    marks them. Raises the errors of the value's own reducers, and RefMet at the first ref if
    `stop_at_refs`.
    """
    stream = PickleStream()
    light = LightPickler(stream, 5, buffer_callback=stream.buffers.append)
    light.stream = stream
    light.stop_at_refs = stop_at_refs
    try:
        light.dump(value)
    except (RefMet, MemoryError):
        raise
    except Exception as error:  # NeedCloudpickle, or a failure that cloudpickle may fix
        if is_interruption(error):
            raise
        stream = PickleStream()
        heavy: Any = heavy_pickler()(stream, 5, buffer_callback=stream.buffers.append)
        heavy.stream = stream
        heavy.stop_at_refs = stop_at_refs
        heavy.scan = Scan() if scan is None else scan()
        heavy.scan.stream = stream if beside else None
        heavy.dump(value)
    return stream
