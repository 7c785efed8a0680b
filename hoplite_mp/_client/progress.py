"""The bar of `map(progress=)`.

The package tqdm draws bars in terminals and in notebooks. It is an optional dependency, imported
for the first bar. Workers' lines that come while a bar is shown are written above it.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["bars_aside", "length_of", "open_bar"]

_bars: weakref.WeakSet[Any] = weakref.WeakSet()  # tqdm sets `disable` when a bar is closed


def open_bar(progress: bool | str, total: int | None) -> Any:
    """A tqdm bar with a text before it; None if progress is False. ModuleNotFoundError if tqdm is
    not installed."""
    if not isinstance(progress, (bool, str)):
        raise TypeError(f"progress={progress!r}: it must be True, False or a text")
    if progress is False:
        return None
    try:
        with warnings.catch_warnings():
            # In a notebook without ipywidgets the bar is a line of text, as in a terminal.
            warnings.simplefilter("ignore")
            from tqdm.auto import tqdm
    except ImportError as error:
        raise ModuleNotFoundError(
            f"map(progress=) draws with tqdm, which cannot be imported ({error}): "
            "pip install 'hoplite-mp[progress]'",
            name="tqdm",
        ) from error
    bar = tqdm(total=total, desc=progress if isinstance(progress, str) else None)
    _bars.add(bar)
    return bar


def bars_aside(file: Any) -> Any:
    """A context in which a line can be written: bars are cleared before and redrawn after it."""
    bar = next((one for one in list(_bars) if not one.disable), None)
    return contextlib.nullcontext() if bar is None else bar.external_write_mode(file)


def length_of(iterables: Iterable[Any]) -> int | None:
    """How many items zip() would give; None if that is unknown without reading them."""
    lengths = []
    for one in iterables:
        try:
            lengths.append(len(one))
        except TypeError:
            return None
    return min(lengths, default=0)
