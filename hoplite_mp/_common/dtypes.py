"""The names that dtypes travel under, and the memory of an array of any of them as plain bytes.

The node can read a name without pickle.
"""

from __future__ import annotations

import functools
import pickle
import re
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

CACHE_ENTRIES_MAX = 4096
NAME_CHARS_MAX = 64  # how much of a wrong name the error shows

# All names that `dtype_name` makes of NumPy's own dtypes. np.dtype accepts far more strings, and
# evaluates parts of some.
_NUMPY_NAME = re.compile(
    r"[<>|](?:[biufcSU][1-9][0-9]{0,9}|[mM]8(?:\[[0-9]{0,10}(?:[YMWDhms]|[munpfa]s)\])?)"
)

_dtype_names: dict[np.dtype[Any], str | None] = {}


def dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The name that `named_dtype` turns back into `dtype`; None if only pickle can describe it."""
    if dtype.metadata is not None:  # Equal to the dtype without metadata, but not the same.
        return None
    try:
        return _dtype_names[dtype]
    except KeyError:
        pass
    name: str | None = None
    if dtype.type.__module__ == "ml_dtypes":
        name = dtype.name
    elif dtype.kind in "biufcmMSU" and dtype.itemsize and dtype.isbuiltin != 2:
        name = dtype.str
    if len(_dtype_names) >= CACHE_ENTRIES_MAX:
        _dtype_names.clear()
    _dtype_names[dtype] = name
    return name


@functools.lru_cache(CACHE_ENTRIES_MAX)
def named_dtype(name: str) -> np.dtype[Any]:
    """The dtype that `dtype_name` named so. ValueError for a name that `dtype_name` does not make,
    because it may come from another host. ImportError where ml_dtypes is missing."""
    try:
        if _NUMPY_NAME.fullmatch(name):
            dtype: np.dtype[Any] | None = np.dtype(name)
        else:
            import ml_dtypes  # Not needed, and perhaps not installed, if its dtypes are not used.

            dtype = np.dtype(getattr(ml_dtypes, name))
    except (TypeError, AttributeError):
        dtype = None
    if dtype is None or dtype_name(dtype) != name:
        raise ValueError(f"{name[:NAME_CHARS_MAX]!r} is no dtype's name")
    return dtype


def raw_bytes(array: Array) -> pickle.PickleBuffer:
    """The memory of a contiguous array as a buffer, whatever its dtype and subclass."""
    if type(array) is not np.ndarray:
        array = np.ndarray.view(array, np.ndarray)
    dtype = array.dtype
    if dtype.kind not in "biufcSU" or dtype.isbuiltin == 2:
        # The buffer protocol has no format for dates, records and foreign dtypes; void bytes do.
        array = array.view(np.dtype((np.void, dtype.itemsize)))
    buffer: Any = array  # numpy's stubs declare the buffer protocol from Python 3.12 on.
    return pickle.PickleBuffer(buffer)
