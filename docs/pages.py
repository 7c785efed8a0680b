"""Writes the pages of the API: `python docs/pages.py DIRECTORY`. A warning is an error.

Why it exists: the public names say that they are from `hoplite_mp`, which is what users are to see
in tracebacks and what pickles are to find; pdoc looks for their source, and for the names in their
annotations, where they say they are from. So the truth is put back before it looks.
"""

from __future__ import annotations

import collections.abc
import inspect
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pdoc

import hoplite_mp
from hoplite_mp import executor, ref

# Made by calls of the library alone: how is nobody's business.
MADE_ELSEWHERE = (hoplite_mp.Future, hoplite_mp.Group, hoplite_mp.ObjectRef, hoplite_mp.Node)


def home_of(thing: Any) -> str:
    """The module in which a class or a function is written."""
    if inspect.isfunction(thing):
        return str(thing.__globals__["__name__"])
    parts = [getattr(part, "__func__", part) for part in vars(thing).values()]
    homes = [part.__globals__["__name__"] for part in parts if inspect.isfunction(part)]
    ours = [home for home in homes if home.startswith("hoplite_mp.")]
    return ours[0] if ours else str(thing.__module__)


def main(directory: str) -> None:
    """All pages, below `directory`."""
    for name in hoplite_mp.__all__:
        thing = getattr(hoplite_mp, name)
        setattr(hoplite_mp, name, thing)  # some errors are made at their first use
        thing.__module__ = home_of(thing)
        # What is imported for type checkers alone.
        module: Any = sys.modules[thing.__module__]
        for other in ("Callable", "Generator", "Iterable", "Iterator", "Sequence"):
            vars(module).setdefault(other, getattr(collections.abc, other))
        vars(module).setdefault("Path", Path)
        vars(module).setdefault("os", os)
        vars(module).setdefault("Future", hoplite_mp.Future)
    executor.Future = hoplite_mp.Future  # type: ignore[attr-defined]
    vars(ref).setdefault("Callable", collections.abc.Callable)
    for made in MADE_ELSEWHERE:
        made.__init__.__doc__ = "@private"
    warnings.simplefilter("error")
    pdoc.pdoc("hoplite_mp", output_directory=Path(directory))


if __name__ == "__main__":
    main(sys.argv[1])
